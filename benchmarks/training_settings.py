"""Settings of the training benchmark."""

from dataclasses import dataclass

from benchmarks.methods import KERNELS
from benchmarks.options import check_choices, check_positive, option
from benchmarks.shapes import SHAPES
from corecontext.config import PAPER_RULE, CCAConfig

LENGTHS_ON_GPU = (8192, 32_768, 131_072, 262_144, 524_288)
OURS = ("cca",)


@dataclass(frozen=True)
class TrainingBench:
    """Model, lengths and methods to measure."""

    lengths: tuple[int, ...] = option((1024, 4096), gpu=LENGTHS_ON_GPU, name="length")
    """Tokens of a sequence, or of each process's part."""
    shape: str = "llama-1b"
    """llama-1b, llama2-7b, llama3.1-8b, qwen2.5-7b or tiny."""
    methods: tuple[str, ...] = option((), name="method")
    """cca, full, sdpa_flash or sdpa_cudnn. Default: cca and the full attention that suits."""
    context_parallel: bool = False
    """One sequence on all processes that torchrun started."""
    group_size: int = PAPER_RULE["group_size"]
    """Tokens per core token, g."""
    window_size: int = PAPER_RULE["window_size"]
    """Nearest tokens kept as they are, s."""
    repeats: int = 5
    """Steps that are timed, after those that warm up."""
    limit_s: float = 60.0
    """Leave a method out where a step is estimated to take longer."""
    fuse: bool = False
    """Compile norms, MLPs and rotation, for every method."""
    device: str = "cpu"
    """auto, cpu or cuda. Default: auto."""

    def __post_init__(self) -> None:
        check_choices("shape", (self.shape,), tuple(SHAPES))
        check_choices("method", self.methods, (*OURS, "full", *KERNELS))
        if self.context_parallel and set(self.methods) - {"cca"}:
            raise ValueError("method must be cca with --context-parallel. Leave --method out.")
        check_positive(length=self.lengths, repeats=self.repeats)
        if not self.limit_s > 0:
            raise ValueError(f"limit_s must be above 0, got {self.limit_s}.")
        CCAConfig.pooling(self.group_size, self.window_size)  # validates

    @property
    def cuda(self) -> bool:
        """Whether this runs on a GPU."""
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> str:
        """The dtype of the arithmetic."""
        return "bfloat16" if self.cuda else "float32"

    @property
    def timed_methods(self) -> tuple[str, ...]:
        """The methods that are measured, CCA first: the others may run out of time."""
        if self.methods:
            return self.methods
        if self.context_parallel:
            return ("cca",)
        return ("cca", *KERNELS) if self.cuda else ("cca", "full")
