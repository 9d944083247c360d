"""List the published rows of a pretrained model, the most important first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from reproduction.published import command_of, options_of
from reproduction.real_methods import Sizes
from reproduction.real_training import Adaptation

HEADS = "18:2,23:0,17:1,23:2,20:2,24:2"
"""KV heads of SmolLM2-135M that lower the far loss most, found on two windows of lm_train."""

# Estimated seconds on one H200.
START_SECONDS = 15.0
"""Load models and make texts."""
SEARCH_SECONDS = 60.0
"""Search for heads."""
STEP_SECONDS = {
    "full": 0.5,
    "streaming_llm": 0.45,
    "streaming_llm_wide": 0.45,
    "cca": 0.415,
    "cca_raw_heads": 0.6,
    "duo_attention": 0.59,
}
"""A training step of 8 windows of 8,192 tokens, by method."""
FETCH_STEP_SECONDS = 0.8
"""The same of methods that fetch."""
READING_SECONDS = 0.15
"""Read a window of 8,192 tokens, or a prompt with its answer."""
NESTED = ("sizes", "adaptation")
"""Settings of a row that hold several."""


@dataclass(frozen=True)
class Row:
    """A method with its settings, and the measurements of it. Settings have the names and defaults
    of their options in `python -m reproduction real`."""

    method: str
    sizes: Sizes = field(default_factory=Sizes)
    adaptation: Adaptation = field(default_factory=Adaptation)
    windows: int = 32
    """Of the far perplexity."""
    needles: int = 25
    """Of each length."""
    needle_lengths: tuple[int, ...] = (4000, 7900)
    lists: int = 10
    full_heads: str | None = None
    """KV heads that keep every token; None searches for them."""
    head_needles: int = 0
    """Needles of this search; 0 searches by far halves of windows."""

    @property
    def trained_tokens(self) -> int:
        """The tokens of the training."""
        return self.adaptation.steps * self.adaptation.rows * self.sizes.length

    def command(self, model: str) -> str:
        """Return the command that measures this row of a model alone."""
        settings = {name: value for name, value in vars(self).items() if name not in NESTED}
        options = options_of(settings, vars(Row("")))
        for nested in NESTED:
            values = getattr(self, nested)
            options += options_of(vars(values), vars(type(values)()))
        return command_of("real", model, options)

    def training_seconds(self) -> float:
        """Estimate the training."""
        length = self.sizes.length
        step = STEP_SECONDS.get(self.method, FETCH_STEP_SECONDS)
        # Attention takes more of longer windows.
        return step * self.trained_tokens / 65536 * max(1.0, length / 8192) ** 0.5

    def seconds(self, *, is_trained: bool) -> float:
        """Estimate the whole row.

        Args:
            is_trained: Whether the trained model is saved already.
        """
        tokens = self.windows * self.sizes.length + self.needles * sum(self.needle_lengths)
        seconds = START_SECONDS + READING_SECONDS * (tokens / 8192 + self.lists)
        if self.head_needles:
            seconds += SEARCH_SECONDS
        return seconds if is_trained else seconds + self.training_seconds()


PLAIN = Sizes()
MASS = Sizes(core_mass=True)
PAIRS = replace(MASS, fetch_groups=64)
"""Fetch of the default recipe: 64 groups of 16 by pairs:2."""
SEGMENTS = replace(PAIRS, fetch_index="segments:8:2")
BITS = replace(MASS, fetch_groups=32, fetch_index="bits:2", fetch_group_size=32)
"""32 groups of 32 by bits:2, at the same bytes."""
BOUNDS = replace(MASS, fetch_index="bounds")
"""The selection of Quest."""
RECIPE = replace(PAIRS, window_size=240, store="host")
"""The default recipe of `corecontext train`."""
ADAPTED = Adaptation(120, rows_at_once=8)
"""The protocol's training."""
LORA = replace(ADAPTED, strategy="lora", learning_rate=1e-3)


def _adapted(
    method: str,
    sizes: Sizes = PLAIN,
    seed: int = 0,
    *,
    needles: int = 100,
    full_heads: str | None = None,
    head_needles: int = 0,
    **training: Any,
) -> Row:
    """Return a row that is trained by the protocol, but for settings of its training."""
    return Row(
        method,
        sizes,
        replace(ADAPTED, seed=seed, **training),
        needles=needles,
        full_heads=full_heads,
        head_needles=head_needles,
    )


def _extended(method: str, sizes: Sizes = PLAIN) -> Row:
    """Return a row that is trained on windows of 32,768 tokens with a new rotary base."""
    adaptation = Adaptation(40, rows=2, rows_at_once=1, rope_theta=500000.0)
    sizes = replace(sizes, length=32768)
    return Row(method, sizes, adaptation, windows=12, needle_lengths=(16000, 32000), lists=0)


# Rows whose trained models rivals take, too.
FULL = _adapted("full", needles=25)
DEFAULT_RECIPE = _adapted("fetch_equal_bytes", PAIRS, needles=25)
CORES = _adapted("cca", MASS, needles=25)
RAW_HEADS = _adapted("cca_raw_heads", MASS, full_heads=HEADS, needles=25)

ROWS = (
    # 1. Trained at equal bytes: three seeds of the best setting, of DuoAttention and of the ends;
    # the questions of a seed are made once in a run.
    FULL,
    _adapted("full", seed=1, needles=25),
    _adapted("full", seed=2),
    _adapted("streaming_llm", needles=25),
    _adapted("streaming_llm", seed=1),
    DEFAULT_RECIPE,
    CORES,
    _adapted("duo_attention", needles=25, full_heads=HEADS),
    _adapted("fetch_equal_bytes", BITS),
    _adapted("streaming_llm", seed=2),
    _adapted("fetch_equal_bytes", BITS, seed=2),
    _adapted("duo_attention", seed=2, full_heads=HEADS),
    _adapted("fetch_equal_bytes", BITS, seed=1),
    _adapted("duo_attention", seed=1, full_heads=HEADS),
    _adapted("cca"),
    _adapted("fetch_equal_bytes", PAIRS, seed=1),
    _adapted("fetch_equal_bytes", PAIRS, seed=2),
    RAW_HEADS,
    _adapted("streaming_llm_wide"),
    # 2. The best setting in an adapter of 7 MiB.
    Row("fetch_equal_bytes", BITS, LORA, needles=100),
    # 3. Other trainings.
    _adapted("fetch_equal_bytes", BITS, layer_steps=60),
    _adapted("cca", MASS, layer_steps=60),
    _adapted("fetch_equal_bytes", BITS, distil=1.0),
    _adapted("fetch_equal_bytes", BITS, distil=0.0),
    _adapted("fetch_equal_bytes", BITS, learning_rate=5e-5),
    _adapted("fetch_equal_bytes", BITS, learning_rate=2e-4),
    _adapted("fetch_equal_bytes", BITS, strategy="partial"),
    _adapted("duo_attention", head_needles=8),
    _adapted("fetch_raw_heads", replace(MASS, store="host"), full_heads=HEADS),
    # 4. As it is, the last with more needles.
    *(Row(method) for method in ("full", "window", "streaming_llm", "streaming_llm_wide")),
    *(Row("cca", sizes) for sizes in (MASS, PLAIN)),
    Row("cca_paper"),
    Row("cca_heavy_token", lists=0),
    Row("cca_heavy_tokens", lists=0),
    Row("cca_worst_groups", lists=0),
    *(Row("cca_raw_heads", sizes, full_heads=HEADS) for sizes in (MASS, PLAIN)),
    Row("duo_attention", full_heads=HEADS),
    Row("fetch"),
    Row("fetch", replace(PAIRS, fetch_groups=128)),
    *(Row("fetch", replace(MASS, store="host", fetch_groups=count)) for count in (32, 64)),
    *(Row("fetch", replace(MASS, fetch_index="bits:2", fetch_groups=count)) for count in (32, 64)),
    *(Row("fetch_equal_bytes", sizes) for sizes in (PAIRS, SEGMENTS, BITS)),
    Row("fetch_raw_heads", MASS, full_heads=HEADS),
    Row("fetch_equal_bytes", BITS, needles=100),
    Row("full", needles=100),
    Row("fetch", BOUNDS, needles=100),
    Row("fetch", replace(BOUNDS, fetch_groups=64), needles=100),
    # 5. Windows of 32,768 tokens, alone on a GPU.
    _extended("full"),
    _extended("fetch", RECIPE),
    # 6. As many needles for rows of 25.
    _adapted("full"),
    _adapted("full", seed=1),
    _adapted("fetch_equal_bytes", PAIRS),
    _adapted("duo_attention", full_heads=HEADS),
    _adapted("streaming_llm"),
    _adapted("streaming_llm_wide", seed=1),
    _adapted("streaming_llm_wide", seed=2),
)
"""The rows of the tables of docs/real-model.md."""
