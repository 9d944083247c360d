"""What the benchmark of whole models measures: its settings, and what suits a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.model_methods import METHODS
from corecontext.config import CCAConfig, check_choice

WHATS = ("ftl", "itl")
MODES = ("lengths", "sweep", "throughput")
FUSES = ("none", "compile")
SWEEP_GROUPS, SWEEP_WINDOWS = (
    (2, 4, 8, 16, 32, 64),
    (256, 512, 1024, 2048, 4096),
)  # the paper's Tables 8 and 9


@dataclass(frozen=True)
class ModelBench:
    """What to measure."""

    shape: str
    lengths: Sequence[int]
    methods: Sequence[str]
    """Names from `bench.model_methods`."""
    mode: str = "lengths"
    """Methods by length; "sweep": CCA by g and s; "throughput": tokens per second at the best batch
    that fits."""
    what: Sequence[str] = WHATS
    """First tokens (with peak memory and cache), next tokens, or both."""
    dtype: str = "float32"
    device: str = "cpu"
    group_size: int = 16
    window_size: int = 1024
    cache_dtype: str = "auto"
    fuses: Sequence[str] = ("none",)
    """Whether CCA runs as it is, with its elementwise work compiled, or each in turn."""
    chunk_size: int | None = None
    """Tokens of CCA's prompt read at once; None follows from the free memory."""
    repeats: int = 3
    steps: int = 32
    """Further tokens of one sample."""
    baseline_limit_s: float = 60.0
    """A prompt of full attention that is estimated to take longer is left out."""
    max_batch: int = 1024

    def __post_init__(self) -> None:
        self.config()  # validates
        for name, values in (
            ("length", self.lengths),
            ("repeats", (self.repeats,)),
            ("steps", (self.steps,)),
            ("max_batch", (self.max_batch,)),
            ("chunk_size", () if self.chunk_size is None else (self.chunk_size,)),
        ):
            for value in values:
                if value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}.")
        for name, given, known in (
            ("method", self.methods, METHODS),
            ("what", self.what, WHATS),
            ("fuse", self.fuses, FUSES),
            ("mode", (self.mode,), MODES),
            ("dtype", (self.dtype,), ("float32", "bfloat16", "float16")),
        ):
            for word in given:
                check_choice(name, word, known)
        if "cca_raw" in self.methods and self.mode != "lengths":
            raise ValueError(
                f"method must be without 'cca_raw' for a {self.mode} run, which does not measure it, got "
                f"{', '.join(self.methods)}. Leave it out."
            )
        if not self.baseline_limit_s > 0:
            raise ValueError(f"baseline_limit_s must be above 0, got {self.baseline_limit_s}.")

    def config(self, group_size: int | None = None, window_size: int | None = None) -> CCAConfig:
        """CCA's settings."""
        return CCAConfig(
            group_size or self.group_size,
            window_size or self.window_size,
            cache_dtype=self.cache_dtype,
        )

    def sweep(self) -> list[CCAConfig]:
        """CCA's settings, g by g and s by s."""
        pairs = dict.fromkeys(
            [
                *((g, self.window_size) for g in SWEEP_GROUPS),
                *((self.group_size, s) for s in SWEEP_WINDOWS),
            ]
        )
        return [self.config(*pair) for pair in pairs]


def model_defaults(device: str, shape: str, **given: Any) -> ModelBench:
    """What suits a device where nothing else is given."""
    cuda, mode = torch.device(device).type == "cuda", given.get("mode", "lengths")
    if cuda:
        lengths = {
            "lengths": [2**i for i in range(12, 18)],
            "sweep": [16384],
            "throughput": [32768],
        }[mode]
        methods: tuple[str, ...] = ("sdpa_flash", "sdpa_cudnn", "full_rows", "streaming_llm", "cca")
        more: dict[str, Any] = {"dtype": "bfloat16"}
    else:
        lengths, methods, more = (
            [2048 if mode == "lengths" else 512],
            ("full", "streaming_llm", "cca"),
            {"steps": 8, "max_batch": 4},
        )
    if mode != "lengths":
        methods = tuple(method for method in methods if method == "cca" or mode == "throughput")
    return ModelBench(
        shape, device=device, **{"lengths": lengths, "methods": methods, **more, **given}
    )
