"""Settings of the serving benchmark."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.options import check_choices, check_positive, option
from benchmarks.shapes import SHAPES
from corecontext.config import PRESETS

MODES = ("day", "rising", "saturated")
LLAMA_31 = {
    **SHAPES["llama3.1-8b"]._asdict(),
    "architectures": ["LlamaForCausalLM"],
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
SERVED_SHAPES: dict[str, dict[str, Any]] = {"llama3.1-8b": LLAMA_31}
"""The config.json of models with random weights."""


@dataclass(frozen=True)
class ServeBench:
    """Server, load and variants to measure."""

    mode: str = "day"
    """day: a day-shaped curve; rising: rate after rate until the median wait for the first token
    passes the limit; saturated: all requests at once."""
    variants: tuple[str, ...] = option(("elastic", "fixed"), name="variant")
    """elastic, fixed (the model's g and s), a preset, cca:G:S or full (repeatable)."""
    model: str | None = None
    """As for serve."""
    shape: str | None = None
    """llama3.1-8b: a model of these sizes with random weights."""
    prompt_lengths: tuple[int, ...] = option((1024,), name="prompt-length")
    """Tokens of each prompt; all are distinct (repeatable)."""
    shared_length: int = 0
    """Tokens that all prompts begin with."""
    new_tokens: int = 64
    """Tokens of each answer."""
    seconds: float = 240.0
    """Duration of the day, or of each rate of a rising load."""
    base_rate: float = 0.2
    """Requests a second at night, or at the first rate."""
    peak_rate: float = 2.0
    """Requests a second at the peak, or at the last rate."""
    growth: float = 1.25
    """Factor from one rate of a rising load to the next."""
    first_token_limit: float = 2.0
    """Median seconds to the first token at which a rising load ends."""
    counts: tuple[int, ...] = option((32,), name="requests")
    """Requests to a saturated server, all at once (repeatable)."""
    seed: int = 0
    """Seed of arrivals and prompts."""
    group_size: int | None = None
    """Tokens per core token, g. Default: the checkpoint's, else the package's."""
    window_size: int | None = None
    """Nearest tokens kept as they are, s. Default: the checkpoint's, else the package's."""
    cache_mib: int | None = None
    """As for serve."""
    host_cache_mib: int | None = None
    """As for serve."""
    max_running: int = 64
    """As for serve."""
    rows_per_pool: int | None = None
    """As for serve."""
    chunk_size: int | None = None
    """As for serve."""
    hit_share: float | None = None
    """Share of the groups of a step that are in a slot, for presets on a GPU: choices that repeat
    so are replayed, because the shape's random weights choose at random. None leaves them."""
    dtype: str = "auto"
    """auto (float32 on a CPU), float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def __post_init__(self) -> None:
        check_choices("mode", (self.mode,), MODES)
        if self.shape is not None and (self.shape not in SERVED_SHAPES or self.model is not None):
            raise ValueError(
                f"shape must be one of {', '.join(SERVED_SHAPES)}, without --model; got "
                f"{self.shape!r}."
            )
        if not self.variants:
            raise ValueError("variant must be given at least once.")
        for variant in self.variants:
            self.server_options(variant)
        check_positive(
            prompt_length=self.prompt_lengths,
            new_tokens=self.new_tokens,
            requests=self.counts,
            max_running=self.max_running,
        )
        if not self.prompt_lengths or not self.counts:
            raise ValueError("prompt-length and requests must be given at least once.")
        if self.hit_share is not None and len(self.prompt_lengths) > 1:
            raise ValueError("hit_share must come with one prompt-length, got several.")
        if self.hit_share is not None and (not 0 <= self.hit_share <= 1 or self.shape is None):
            raise ValueError(
                f"hit_share must be in 0 .. 1, and come with --shape, got {self.hit_share}."
            )
        shortest = min(self.prompt_lengths)
        if not 0 <= self.shared_length < shortest:
            raise ValueError(
                "shared_length must be at least 0 and less than prompt_length "
                f"{shortest}, got {self.shared_length}."
            )
        for name in ("seconds", "base_rate", "peak_rate", "first_token_limit"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}.")
        if self.peak_rate < self.base_rate or self.growth <= 1:
            raise ValueError(
                f"peak_rate must be at least base_rate {self.base_rate} and growth more than 1, "
                f"got {self.peak_rate} and {self.growth}."
            )

    def loads(self) -> "Iterator[ServeBench]":
        """Yield the benchmark of each length of prompts, and number of requests to a saturated
        server, that one server gets one after the other: each of a seed of its own, so that no
        prompt begins as an earlier one."""
        counts = self.counts if self.mode == "saturated" else self.counts[:1]
        pairs = itertools.product(self.prompt_lengths, counts)
        for number, (length, count) in enumerate(pairs):
            seed = self.seed + number
            yield replace(self, prompt_lengths=(length,), counts=(count,), seed=seed)

    @property
    def prompt_length(self) -> int:
        """Tokens of each prompt of one load."""
        (length,) = self.prompt_lengths
        return length

    @property
    def requests(self) -> int:
        """Requests of one load to a saturated server."""
        (count,) = self.counts
        return count

    def server_options(self, variant: str) -> list[str]:
        """Return a variant's options of `corecontext serve`.

        Raises:
            ValueError: the variant is unknown.
        """
        if variant == "full":
            return ["--method", "full"]
        if variant in ("elastic", "fixed"):
            return ["--policy", variant, *self.options("group_size", "window_size")]
        if variant in PRESETS:
            return ["--policy", "fixed", "--preset", variant]
        kind, *sizes = variant.split(":")
        if kind != "cca" or len(sizes) != 2 or not all(x.isdigit() and int(x) > 0 for x in sizes):
            raise ValueError(
                f"variant must be elastic, fixed, full, {', '.join(PRESETS)} or cca:G:S, got "
                f"{variant!r}."
            )
        return ["--policy", "fixed", "--group-size", sizes[0], "--window-size", sizes[1]]

    def options(self, *names: str) -> list[str]:
        """Return the options of these fields, as far as they have a value."""
        options = []
        for name in names:
            if getattr(self, name) is not None:
                options += ["--" + name.replace("_", "-"), str(getattr(self, name))]
        return options

    def replays(self, variant: str) -> bool:
        """Return whether the choices of a variant are replayed."""
        return self.hit_share is not None and variant in PRESETS

    def params(self, variant: str, **more: Any) -> dict[str, Any]:
        """Return a record's params."""
        duration: dict[str, Any] = {"seconds": self.seconds}
        if self.mode == "saturated":
            duration = {"requests": self.requests}
        if self.replays(variant):
            more["hit_share"] = self.hit_share
        if self.host_cache_mib is not None:
            more["host_cache_mib"] = self.host_cache_mib
        return {
            "mode": self.mode,
            "variant": variant,
            "model": self.shape or self.model or "bundled",
            "random_weights": self.shape is not None,
            "prompt_length": self.prompt_length,
            "shared_length": self.shared_length,
            "new_tokens": self.new_tokens,
            "dtype": self.dtype,
            "max_running": self.max_running,
            "cache_mib": self.cache_mib,
            "chunk_size": self.chunk_size,
            **duration,
            "seed": self.seed,
            **more,
        }
