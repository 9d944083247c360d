"""List the published rows of a pretrained model, the most important first."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reproduction.published import command_of, options_of
from reproduction.real.methods import PRESETS, Sizes
from reproduction.real.training import Adaptation

HEADS = "18:2,23:0,17:1,23:2,20:2,24:2"
"""KV heads of SmolLM2-135M that lower the far loss most, found on two windows of lm_train."""

HEAD_NEEDLES = 4
"""Hidden numbers by which other heads are searched for."""

# Estimated seconds on one H200.
START_SECONDS = 6.0
"""Load the model, write and read the trained one. A run's first row makes texts besides, its first
training compiles and computes the teacher's view of all windows: 40 to 60 s more."""
STEP_SECONDS = {
    "full": 0.5,
    "streaming_llm": 0.55,
    "streaming_llm_wide": 0.55,
    "cca": 0.36,
    "cca_raw_heads": 0.6,
    "duo_attention": 0.54,
}
"""A training step of 8 windows of 8,192 tokens, by method."""
FETCH_STEP_SECONDS = 0.72
"""The same of methods that fetch."""
READING_SECONDS = 0.05
"""Read 8,192 tokens, or a list."""
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
    """Hidden numbers by which they are searched for; 0 searches by the far loss."""
    next_tokens: int = 0
    """Last tokens that are measured alone; 0 measures far halves."""

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
        return seconds if is_trained else seconds + self.training_seconds()


PLAIN = Sizes()
MASS = Sizes(core_mass=True)
PAIRS = replace(MASS, fetch_groups=64)
"""64 groups of 16 by pairs:2."""
BITS = replace(MASS, fetch_groups=32, fetch_index="bits:2", fetch_group_size=32)
"""32 groups of 32 by bits:2: at equal bytes the defaults of `CCAConfig`, but for k."""
RECIPE = replace(BITS, group_size=32, window_size=160, fetch_group_size=None, store="host")
"""These sizes, for windows of any length."""
ADAPTED = Adaptation(120, rows_at_once=8, fuse=True)
"""The protocol's training."""
LORA = replace(ADAPTED, fuse=False, strategy="lora", learning_rate=1e-3)
LARGE_LORA = replace(LORA, lora_rank=26)
"""In 8 bits 7.6 MiB."""
PACKAGED = replace(LARGE_LORA, learning_rate=4e-3)
"""The training of the adapter that the package has for SmolLM2."""
SEEDS = (0, 1, 2)
TRY_STEPS = 30
"""Steps of a training that other settings are tried in."""


def _adapted(
    method: str,
    sizes: Sizes = PLAIN,
    seed: int = 0,
    *,
    needles: int = 100,
    **heads: Any,
) -> Row:
    """Return a row that is trained by the protocol; `heads` are settings of heads that keep every
    token."""
    adaptation = replace(ADAPTED, seed=seed)
    return Row(method, sizes, adaptation, needles=needles, **heads)


def _tried(method: str, sizes: Sizes = PLAIN, **training: Any) -> Row:
    """Return a row of a short training with other settings than the protocol's."""
    # Compiled parts of frozen weights are others.
    fuse = training.get("strategy", "full") == "full"
    adaptation = replace(ADAPTED, steps=TRY_STEPS, fuse=fuse, **training)
    return Row(method, sizes, adaptation, needles=0, lists=0)


def _extended(method: str, sizes: Sizes = PLAIN) -> Row:
    """Return a row that is trained on windows of 32,768 tokens with a new rotary base."""
    adaptation = Adaptation(20, rows=2, rows_at_once=1, rope_theta=500000.0)
    sizes = replace(sizes, length=32768)
    lengths = (16000, 32000)
    return Row(method, sizes, adaptation, windows=12, needles=10, needle_lengths=lengths, lists=0)


def _untrained(*lengths: int, windows: int = 32) -> list[Row]:
    """Return the rows of the presets on a model without a chat template, beside the ends of the
    gain, windows of their bytes, and other numbers of fetched groups."""
    rows = []
    for length in lengths:
        sizes = Sizes(length)
        options: dict[str, Any] = {"windows": windows, "needles": 0, "lists": 0}
        rows += [Row(method, sizes, **options) for method in ("full", "streaming_llm", *PRESETS)]
        rows += [Row(f"window_of_{name}", sizes, **options) for name in PRESETS]
        rows += [Row("fetch", fetched, **options) for fetched in _by_groups(length)]
        rows.append(Row("cca", replace(sizes, core_mass=True), **options))
    return rows


def _by_groups(length: int) -> list[Sizes]:
    """Return the sizes of `default` with half and twice its groups."""
    count = PRESETS["default"].fetch_groups
    recipe = replace(RECIPE, length=length)
    return [replace(recipe, fetch_groups=groups) for groups in (count // 2, 2 * count)]


def _behind_prompts(*lengths: int, windows: int = 32) -> list[Row]:
    """Return the rows of last tokens behind prompts, of the presets and the ends of the gain."""
    options: dict[str, Any] = {"next_tokens": 512, "needles": 0, "lists": 0, "windows": windows}
    methods = ("full", "streaming_llm", *PRESETS)
    return [
        *(Row(method, Sizes(length), **options) for length in lengths for method in methods),
        *(Row("fetch", sizes, **options) for length in lengths for sizes in _by_groups(length)),
    ]


# Rows whose trained models rivals take, too.
FULL = _adapted("full", needles=25)
FETCH_BITS = _adapted("fetch_equal_bytes", BITS)
CORES = _adapted("cca", MASS, needles=25)
RAW_HEADS = _adapted("cca_raw_heads", MASS, full_heads=HEADS, needles=25)

ROWS = (
    # 1. As it is, with many needles.
    Row("full", needles=100),
    Row("fetch_equal_bytes", BITS, needles=100),
    # 2. Trained at equal bytes: three seeds of the best setting, of DuoAttention and of the ends;
    # the questions of a seed are made once in a run.
    FULL,
    _adapted("full", seed=1, needles=25),
    _adapted("full", seed=2),
    _adapted("streaming_llm", needles=25),
    _adapted("streaming_llm", seed=1),
    _adapted("fetch_equal_bytes", PAIRS, needles=25),
    CORES,
    RAW_HEADS,
    _adapted("duo_attention", needles=25, full_heads=HEADS),
    FETCH_BITS,
    _adapted("streaming_llm", seed=2),
    _adapted("fetch_equal_bytes", BITS, seed=2),
    _adapted("duo_attention", seed=2, full_heads=HEADS),
    _adapted("fetch_equal_bytes", BITS, seed=1),
    _adapted("duo_attention", seed=1, full_heads=HEADS),
    _adapted("cca"),
    _adapted("streaming_llm_wide", needles=25),
    # 3. The best setting in an adapter of at most 8 MiB, the last one the package's, beside full
    # attention and sinks and window with such an adapter.
    Row("fetch_equal_bytes", BITS, LORA, needles=100),
    Row("fetch_equal_bytes", BITS, replace(LARGE_LORA, learning_rate=2e-3), needles=100),
    *(Row("fetch_equal_bytes", BITS, replace(PACKAGED, seed=seed), needles=100) for seed in SEEDS),
    *(Row(method, PLAIN, PACKAGED) for method in ("full", "streaming_llm")),
    # 4. Three seeds of the other trained rows.
    *(_adapted("cca_raw_heads", MASS, seed, full_heads=HEADS, needles=25) for seed in SEEDS[1:]),
    *(_adapted("streaming_llm_wide", seed=seed, needles=25) for seed in SEEDS[1:]),
    *(_adapted("cca", sizes, seed, needles=25) for seed in SEEDS[1:] for sizes in (MASS, PLAIN)),
    *(_adapted("fetch_equal_bytes", PAIRS, seed, needles=25) for seed in SEEDS[1:]),
    *(_adapted("fetch", replace(MASS, store="host"), seed, needles=25) for seed in SEEDS),
    # 5. Short trainings: what brings core tokens nearest.
    _tried("full"),
    _tried("streaming_llm"),
    _tried("cca", MASS),
    _tried("cca", MASS, distil=0.0),
    _tried("cca", MASS, distil=1.0),
    _tried("cca", MASS, learning_rate=3e-4),
    _tried("cca", MASS, strategy="partial"),
    _tried("fetch_equal_bytes", BITS),
    _tried("fetch_equal_bytes", BITS, strategy="partial"),
    # Heads found by needles.
    _adapted("cca_raw_heads", MASS, needles=25, head_needles=HEAD_NEEDLES),
    _adapted("duo_attention", needles=25, head_needles=HEAD_NEEDLES),
    # 6. As it is.
    *(Row(method) for method in ("full", "window", "streaming_llm", "streaming_llm_wide")),
    *(Row("cca", sizes) for sizes in (MASS, PLAIN)),
    Row("cca_paper"),
    *(Row("cca_raw_heads", sizes, full_heads=HEADS) for sizes in (MASS, PLAIN)),
    Row("duo_attention", full_heads=HEADS),
    Row("fetch"),
    Row("fetch", replace(PAIRS, fetch_groups=128)),
    *(Row("fetch", replace(MASS, store="host", fetch_groups=count)) for count in (32, 64)),
    *(Row("fetch", replace(MASS, fetch_index="bits:2", fetch_groups=count)) for count in (32, 64)),
    *(Row("fetch_equal_bytes", sizes) for sizes in (PAIRS, BITS)),
    Row("fetch_raw_heads", MASS, full_heads=HEADS),
    # 7. Presets, and what prompts are worth.
    *(Row(method, needles=100) for method in PRESETS),
    *(Row(f"window_of_{name}") for name in PRESETS),
    Row("fetch", _by_groups(8192)[1], needles=100),
    *_behind_prompts(8192),
    # 8. Windows of 32,768 tokens, alone on a GPU.
    _extended("full"),
    _extended("fetch", RECIPE),
)
"""The rows of SmolLM2's tables in docs/real-model.md."""
GEMMA_ROWS = (
    *_untrained(8192, 16384),
    *_behind_prompts(8192, 16384),
    # As many documents of lm_test are as long.
    *_untrained(32768, windows=19),
    *_behind_prompts(32768, windows=19),
)
"""Those of Gemma 3 270M, which has no chat template: no needles and lists."""


def rows_of(model: str) -> Sequence[Row]:
    """Return the published rows of a model, by its name, folder or file."""
    return GEMMA_ROWS if "gemma-3-270m" in model.lower() else ROWS
