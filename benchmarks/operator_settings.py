"""Settings of the operator benchmark: its options, and the params of its records."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.floor import pass_flops
from benchmarks.methods import (
    COMPRESSED,
    DECODING,
    METHODS,
    PASSES,
    SETTINGS,
    Sizes,
    default_methods,
)
from benchmarks.options import DTYPES, check_choices, check_positive, option
from corecontext.config import PAPER_RULE, PRESETS, CCAConfig
from corecontext.ops.api import choose_backend


@dataclass(frozen=True)
class OperatorBench:
    """Sizes and methods to measure."""

    lengths: tuple[int, ...] = option(
        (32768,), gpu=tuple(2**i for i in range(10, 18)), name="length"
    )
    """Sequence length."""
    query_heads: int = option(8, gpu=32, name="heads")
    """Query heads."""
    kv_heads: tuple[int, ...] = option((2,), gpu=(32, 8))
    """Key and value heads."""
    head_dim: int = option(64, gpu=128)
    """Size of a head."""
    batch: int = 1
    """Sequences."""
    dtype: str = option("float32", gpu="bfloat16")
    """float32, bfloat16 or float16."""
    device: str = "cpu"
    """auto, cpu or cuda. Default: auto."""
    group_size: int = PAPER_RULE["group_size"]
    """Tokens per core token, g."""
    window_size: int = PAPER_RULE["window_size"]
    """Nearest tokens kept as they are, s."""
    forward_only: bool = False
    """No backward pass, and on a GPU no decoding."""
    passes: tuple[str, ...] = option(("forward", "forward_backward"), gpu=PASSES, name="pass")
    """forward, backward or forward_backward: passes that are timed unless forward_only. Default:
    forward and forward_backward; on a GPU all. Given, there is no decoding by default."""
    memory_lengths: tuple[int, ...] = option((), name="memory-length")
    """Length at which peak memory is measured. Default: a quarter, half and all of the longest."""
    repeats: int = 5
    """Timed calls; on a GPU, timed queues of calls."""
    methods: tuple[str, ...] = option((), name="method")
    """full, sdpa_flash, sdpa_cudnn, flash_attn_4, flex, packed (CCA by PyTorch's kernels),
    cca_sinks (its first 16 tokens raw), cca_default (these, and masses of core tokens), fetch (raw
    tokens of the 64 best groups of each query), fetch_shared (of 16 queries together), fetch_mean
    and fetch_mean_shared (the same by mean keys), fetch_default and fetch_default_shared (by the
    preset, with its sizes) or cca.
    Default: full and cca; on a GPU the fast kernels of full attention, flex and cca."""
    choices: str = "random"
    """random or model: whether neighbouring queries choose groups as unlike as random ones do, or
    as alike as those of real models."""
    baseline_limit_s: float = 30.0
    """Leave full attention out where a call is estimated to take longer than this."""
    flex_lengths: tuple[int, ...] = option((8192, 32768), name="flex-length")
    """Length at which FlexAttention is measured: it is compiled for each."""
    decode_batches: tuple[int, ...] = option((), gpu=(1, 8, 64), name="decode-batch")
    """Sequences decoded at once. Default: none; on a GPU 1, 8 and 64."""
    decode_lengths: tuple[int, ...] = option((), name="decode-length")
    """Context length of decoding. Default: every length; on a GPU 8192, 32768 and 131072."""

    def __post_init__(self) -> None:
        CCAConfig.pooling(self.group_size, self.window_size)  # validates
        check_positive(
            length=self.lengths,
            memory_length=self.memory_lengths,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            batch=self.batch,
            repeats=self.repeats,
            flex_length=self.flex_lengths,
            decode_batch=self.decode_batches,
            decode_length=self.decode_lengths,
        )
        for kv_heads in self.kv_heads:
            if self.query_heads % kv_heads:
                raise ValueError(
                    f"kv_heads must divide query_heads, got {kv_heads} and {self.query_heads}."
                )
        if self.head_dim % 2 or not 2 <= self.head_dim <= 512:
            raise ValueError(f"head_dim must be even and at most 512, got {self.head_dim}.")
        if not self.baseline_limit_s > 0:
            raise ValueError(f"baseline_limit_s must be above 0, got {self.baseline_limit_s}.")
        check_choices("dtype", (self.dtype,), DTYPES)
        check_choices("method", self.methods, METHODS)
        check_choices("pass", self.passes, PASSES)
        check_choices("choices", (self.choices,), ("random", "model"))

    @property
    def timed_passes(self) -> tuple[str, ...]:
        """The passes that are measured."""
        return ("forward",) if self.forward_only else self.passes

    @property
    def timed_methods(self) -> tuple[str, ...]:
        """The methods that are measured, CCA last."""
        if not self.methods:
            return default_methods(self.device, self.dtype)
        return (*(method for method in self.methods if method != "cca"), "cca")

    @property
    def lengths_of_memory(self) -> tuple[int, ...]:
        """The lengths at which peak memory is measured."""
        longest = max(self.lengths)
        quarters = sorted({max(1, longest // 4), max(1, longest // 2), longest})
        return self.memory_lengths or tuple(quarters)

    @property
    def lengths_of_decoding(self) -> tuple[int, ...]:
        """The context lengths of decoding."""
        if self.decode_lengths or torch.device(self.device).type != "cuda":
            return self.decode_lengths or self.lengths
        usual = tuple(n for n in (8192, 32768, 131072) if n <= max(self.lengths))
        return usual or self.lengths

    def sizes(self, kv_heads: int) -> Sizes:
        """Sizes of the inputs, besides their length."""
        return Sizes(self.query_heads, kv_heads, self.head_dim, self.batch, self.dtype, self.device)

    def params(
        self, method: str, pass_name: str, kv_heads: int, length: int | None, **more: Any
    ) -> dict[str, Any]:
        """Return a record's params; g and s belong to CCA only."""
        params = {
            "method": method,
            "backend": self.backend(method),
            "pass": pass_name,
            "length": length,
            **self.sizes(kv_heads)._asdict(),
            **more,
        }
        del params["device"]
        if method in COMPRESSED:
            params |= {"group_size": self.group_size, "window_size": self.window_size}
        if "fetch" in method:
            settings = (DECODING if pass_name == "decode" else SETTINGS)[method]
            if "preset" in settings:
                settings = PRESETS[settings["preset"]].settings | settings
                params["method"] = "fetch"
            raw_tokens = settings["fetch_groups"] * settings.get("group_size", self.group_size)
            params |= {**settings, "raw_tokens": raw_tokens, "store": "device"}
            params["choices"] = self.choices
        return params

    def backend(self, method: str) -> str:
        """Name the kernel of a method: for CCA, the choice of `backend="auto"` here."""
        if method in ("cca", "cca_default") or "fetch" in method:
            return backend_of_cca(self.head_dim, self.dtype, self.device)
        names = {"full": "sdpa", "sdpa_flash": "flash", "sdpa_cudnn": "cudnn"}
        return names.get(method, method)

    def flops(self, length: int, kv_heads: int, compressed: bool, pass_name: str) -> int:
        """Return the operations of one call."""
        config = (self.group_size, self.window_size) if compressed else (1, 1)
        return pass_flops(
            pass_name,
            length,
            self.query_heads,
            kv_heads,
            self.head_dim,
            group_size=config[0],
            window_size=config[1],
            batch=self.batch,
        )


def backend_of_cca(head_dim: int, dtype: str, device: str) -> str:
    """Return the backend that "auto" chooses for CCA."""
    like = torch.empty(1, 1, 1, head_dim, dtype=getattr(torch, dtype), device=device)
    return choose_backend("auto", like)
