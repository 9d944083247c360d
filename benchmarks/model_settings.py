"""Settings of the benchmark of whole models, and the defaults of a device."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.options import DTYPES, check_choices, check_positive, for_device, option
from corecontext.config import PAPER_RULE, CCAConfig

METHODS = (
    *("full", "sdpa_flash", "sdpa_cudnn", "full_rows", "streaming_llm"),
    *("cca", "fetch", "fetch_host"),
)
WHATS = ("ftl", "itl")
FUSES = ("none", "compile")
# The paper's Tables 8 and 9.
SWEEP_GROUPS = (2, 4, 8, 16, 32, 64)
SWEEP_WINDOWS = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class ModelBench:
    """Model, lengths and methods to measure."""

    shape: str
    """llama2-7b, llama3.1-8b, qwen2.5-7b or tiny, with random weights; or a checkpoint's folder or
    identifier."""
    lengths: tuple[int, ...] = option((), name="length")
    """Context length. Default: 2048, or 512 for --sweep and --throughput; on a GPU 4096, 8192, ...
    131072, or 16384 for --sweep, 32768 for --throughput."""
    methods: tuple[str, ...] = option((), name="method")
    """full, sdpa_flash, sdpa_cudnn, full_rows (full attention decoding with this package's own
    kernel), streaming_llm, cca, fetch (raw tokens of the 64 best groups, kept on the device) or
    fetch_host (in host memory). Default: full, streaming_llm and cca; on a GPU all but full and
    those with fetch."""
    what: tuple[str, ...] = WHATS
    """ftl (first token, peak memory, cache) or itl (next tokens)."""
    sweep: bool = False
    """CCA by group and window size."""
    throughput: bool = False
    """Tokens per second at the best batch that fits."""
    group_size: int = PAPER_RULE["group_size"]
    """Tokens per core token, g."""
    window_size: int = PAPER_RULE["window_size"]
    """Nearest tokens kept as they are, s."""
    cache_dtype: str = "auto"
    """auto, int8 or fp8: CCA's cache."""
    fuses: tuple[str, ...] = option(("none",), name="fuse")
    """none, or compile for CCA with its elementwise work fused."""
    chunk_size: int | None = None
    """Tokens of CCA's prompt read at once. Default: as the free memory allows."""
    dtype: str = option("float32", gpu="bfloat16")
    """float32, bfloat16 or float16."""
    device: str = "cpu"
    """auto, cpu or cuda. Default: auto."""
    repeats: int = 3
    """Samples of each value."""
    steps: int = 32
    """Tokens of one sample of next tokens. Default: 8; on a GPU 32."""
    max_batch: int = 1024
    """Largest batch of --throughput. Default: 4; on a GPU 1024."""
    batches: tuple[int, ...] = option((), name="batch")
    """Batch of --throughput. Default: the largest that fits, and powers of two below it."""
    fetch_slots: int = 0
    """Groups of a KV head that fetch_host keeps on the device."""
    hit_share: float | None = None
    """Have fetch_host choose groups of which this share is the step before's, as in a real text."""
    baseline_limit_s: float = 60.0
    """Leave full attention out where a prompt is estimated to take longer than this."""

    def __post_init__(self) -> None:
        self.config()  # validates
        if self.sweep and self.throughput:
            raise ValueError(
                "sweep and throughput must be asked for one at a time, got both. "
                "Run the command twice."
            )
        check_positive(
            length=self.lengths,
            repeats=self.repeats,
            steps=self.steps,
            max_batch=self.max_batch,
            batch=self.batches,
            chunk_size=self.chunk_size,
        )
        check_choices("method", self.methods, METHODS)
        check_choices("what", self.what, WHATS)
        check_choices("fuse", self.fuses, FUSES)
        check_choices("dtype", (self.dtype,), DTYPES)
        if self.sweep and {"fetch", "fetch_host"}.intersection(self.methods):
            raise ValueError(
                "method must be without fetch for a sweep run, which does not measure it, got "
                f"{', '.join(self.methods)}. Leave it out."
            )
        if self.hit_share is not None and not 0 <= self.hit_share <= 1:
            raise ValueError(f"hit_share must be in 0 .. 1, got {self.hit_share}.")
        if self.hit_share is not None and not self.fetch_slots:
            raise ValueError("hit_share must come with slots, got fetch_slots=0. Give both.")
        if not self.baseline_limit_s > 0:
            raise ValueError(f"baseline_limit_s must be above 0, got {self.baseline_limit_s}.")

    @property
    def mode(self) -> str:
        """ "sweep" (CCA by g and s), "throughput", or "lengths" (methods by length)."""
        if self.sweep:
            return "sweep"
        return "throughput" if self.throughput else "lengths"

    def config(self, group_size: int | None = None, window_size: int | None = None) -> CCAConfig:
        """Return CCA's settings."""
        return CCAConfig.paper(
            group_size or self.group_size,
            window_size or self.window_size,
            cache_dtype=self.cache_dtype,
        )

    def sweep_configs(self) -> list[CCAConfig]:
        """Return CCA's settings, group size by group size, then window by window."""
        by_group = [(g, self.window_size) for g in SWEEP_GROUPS]
        by_window = [(self.group_size, s) for s in SWEEP_WINDOWS]
        return [self.config(*pair) for pair in dict.fromkeys(by_group + by_window)]


def model_defaults(device: str, shape: str, **given: Any) -> ModelBench:
    """Return the settings of a device, those given replacing its defaults."""
    cuda = torch.device(device).type == "cuda"
    by_length = not (given.get("sweep") or given.get("throughput"))
    defaults: dict[str, Any]
    if cuda:
        defaults = {
            "lengths": tuple(2**i for i in range(12, 18)),
            "methods": ("sdpa_flash", "sdpa_cudnn", "full_rows", "streaming_llm", "cca"),
        }
    else:
        defaults = {
            "lengths": (2048,) if by_length else (512,),
            "methods": ("full", "streaming_llm", "cca"),
            "steps": 8,
            "max_batch": 4,
        }
    if given.get("sweep"):
        defaults["methods"] = ("cca",)
    if cuda and not by_length:
        defaults["lengths"] = (16384,) if given.get("sweep") else (32768,)
    return for_device(ModelBench, device, shape=shape, **{**defaults, **given})
