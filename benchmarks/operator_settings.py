"""What the operator benchmark measures: its settings, what suits a device, and how records name it
all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.methods import COMPRESSED, METHODS, PASSES
from corecontext import cost
from corecontext.config import CCAConfig
from corecontext.ops.api import choose_backend


@dataclass(frozen=True)
class OperatorBench:
    """What to measure."""

    lengths: Sequence[int] = (32768,)
    query_heads: int = 8
    kv_heads: Sequence[int] = (2,)
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    group_size: int = 16
    window_size: int = 1024
    passes: Sequence[str] = ("forward", "forward_backward")
    memory_lengths: Sequence[int] | None = None
    """Lengths at which peak memory is measured; default a quarter, half and all of the longest."""
    repeats: int = 5
    methods: Sequence[str] = ()
    """Names from `bench.methods`; default what suits the device."""
    baseline_limit_s: float = float("inf")
    """Full attention is left out where one call is estimated to take longer."""
    flex_lengths: Sequence[int] = (8192, 32768)
    """Lengths at which FlexAttention is measured: it is compiled for each."""
    decode_batches: Sequence[int] = ()
    """Sequences that are decoded at once, at each of the decode_lengths."""
    decode_lengths: Sequence[int] | None = None
    """Context lengths of decoding; default `lengths`."""

    def __post_init__(self) -> None:
        CCAConfig(self.group_size, self.window_size)  # validates
        for name, values in (
            ("length", self.lengths),
            ("memory_length", self.memory_lengths or ()),
            ("query_heads", (self.query_heads,)),
            ("kv_heads", self.kv_heads),
            ("batch", (self.batch,)),
            ("repeats", (self.repeats,)),
            ("flex_length", self.flex_lengths),
            ("decode_batch", self.decode_batches),
            ("decode_length", self.decode_lengths or ()),
        ):
            for value in values:
                if value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}.")
        for kv_heads in self.kv_heads:
            if self.query_heads % kv_heads:
                raise ValueError(
                    f"kv_heads must divide query_heads, got {kv_heads} and {self.query_heads}."
                )
        if self.head_dim % 2 or not 2 <= self.head_dim <= 512:
            raise ValueError(f"head_dim must be even and at most 512, got {self.head_dim}.")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}.")
        if not self.baseline_limit_s > 0:
            raise ValueError(f"baseline_limit_s must be above 0, got {self.baseline_limit_s}.")
        for name, given, known in (
            ("method", self.methods, METHODS),
            ("pass", self.passes, PASSES),
        ):
            for word in given:
                if word not in known:
                    raise ValueError(f"{name} must be one of {', '.join(known)}, got {word!r}.")

    def sizes(self, kv_heads: int) -> dict[str, Any]:
        """How large the inputs are, besides their length."""
        return {
            "query_heads": self.query_heads,
            "kv_heads": kv_heads,
            "head_dim": self.head_dim,
            "batch": self.batch,
            "dtype": self.dtype,
            "device": self.device,
        }

    def params(
        self, method: str, pass_name: str, kv_heads: int, length: int | None, **more: Any
    ) -> dict[str, Any]:
        """A record's params; g and s belong to CCA only."""
        sizes = {k: v for k, v in self.sizes(kv_heads).items() if k != "device"}
        params = {
            "method": method,
            "backend": self.backend(method),
            "pass": pass_name,
            "length": length,
            **sizes,
            **more,
        }
        if method in COMPRESSED:
            params |= {"group_size": self.group_size, "window_size": self.window_size}
        return params

    def backend(self, method: str) -> str:
        """What computes a method: for CCA, what `backend="auto"` chooses here."""
        if method != "cca":
            return {"full": "sdpa", "sdpa_flash": "flash", "sdpa_cudnn": "cudnn"}.get(
                method, method
            )
        return choose_backend(
            "auto",
            torch.empty(
                1, 1, 1, self.head_dim, dtype=getattr(torch, self.dtype), device=self.device
            ),
        )

    def flops(self, length: int, kv_heads: int, compressed: bool, pass_name: str) -> int:
        """Operations of one call."""
        g, s = (self.group_size, self.window_size) if compressed else (1, 1)
        return cost.pass_flops(
            pass_name,
            length,
            self.query_heads,
            kv_heads,
            self.head_dim,
            group_size=g,
            window_size=s,
            batch=self.batch,
        )


def defaults(device: str, **given: Any) -> OperatorBench:
    """What suits a device where nothing else is given: on a GPU a large model's heads, and every
    pass."""
    if torch.device(device).type == "cuda":
        given = {
            "lengths": [2**i for i in range(10, 18)],
            "query_heads": 32,
            "kv_heads": (32, 8),
            "head_dim": 128,
            "dtype": "bfloat16",
            "passes": PASSES,
            **({} if given.get("passes") else {"decode_batches": (1, 8, 64)}),
            **given,
        }
        given.setdefault(
            "decode_lengths",
            [n for n in (8192, 32768, 131072) if n <= max(given["lengths"])] or None,
        )
    return OperatorBench(device=device, **given)
