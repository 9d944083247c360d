"""Define the sizes of the reproduction: the miniature, its brief form and its smoke test."""

from dataclasses import dataclass, replace
from pathlib import Path

from corecontext.files import UserError
from corecontext.loading import load_config


@dataclass(frozen=True)
class Size:
    """One scale of the whole reproduction; steps and lengths in tokens."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    length: int
    window: int
    group: int
    step_tokens: int
    """Tokens of one optimizer step from scratch."""
    levels: tuple[tuple[int, int], ...]
    """Contexts of training from scratch and the steps at each; every method has the same tokens in
    the same order."""
    tune_levels: tuple[tuple[int, int], ...]
    """The same for choosing a rate."""
    follow_steps: int
    """Steps from scratch between two evaluations on held-out text."""
    adapt_tokens: int
    """Tokens of one optimizer step of adapting."""
    adapt_steps: int
    """Steps of every adaptation."""
    short_steps: int
    """Steps of each size of Tables 8 and 9."""
    eval_tokens: int
    """Held-out tokens that perplexity is measured on."""
    questions: int
    """Held-out questions of each retrieval length, and of multi-document QA."""
    groups: tuple[int, ...]
    windows: tuple[int, ...]
    documents: tuple[int, ...]
    seeds: tuple[int, ...] = (1, 0, 2)
    """Seeds of adaptations."""
    bases: tuple[int, ...] = (1, 0, 0)
    """Seed of the base model, trained from scratch, that each of the seeds adapts."""
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Rates from scratch; each method takes its best."""
    adapt_lr: float = 1e-3
    latency_repeats: int = 5
    latency_rows: int = 16
    """Prompts that are timed at once: one prompt of a model this small would time launches."""
    is_brief: bool = False
    """One base at one rate, and only full attention, the window, CCA, masses and fetch: untrained,
    and adapted for a short time."""
    base: str | None = None
    """Folder of a Llama that takes the place of the base trained here; brief sizes alone have
    one."""


FULL = Size(
    name="mini",
    layers=8,
    hidden=512,
    heads=8,
    kv_heads=2,
    ffn=1408,
    length=4096,
    window=256,
    group=16,
    step_tokens=65536,
    levels=((512, 700), (1024, 500), (2048, 900), (4096, 5600)),  # 505 million tokens
    tune_levels=((512, 600), (1024, 250), (2048, 150), (4096, 200)),
    follow_steps=400,  # 79 million
    adapt_tokens=32768,
    adapt_steps=1000,
    short_steps=300,
    eval_tokens=2_000_000,
    questions=300,
    groups=(2, 4, 8, 16, 32, 64),
    windows=(64, 128, 256, 512, 1024),
    documents=(5, 10, 20),
)
BRIEF = replace(
    FULL,
    name="brief",
    levels=FULL.tune_levels,  # 79 million tokens
    adapt_steps=FULL.short_steps,
    eval_tokens=1_000_000,
    groups=(),
    windows=(),
    documents=(20,),
    seeds=(0,),
    bases=(0,),
    rates=(2e-3,),
    latency_repeats=1,
    latency_rows=1,
    is_brief=True,
)


def brief_of(base: str) -> Size:
    """Return a brief size around a Llama in the Hugging Face format: windows of twice the length,
    a window and groups as `corecontext train` has by default.

    Raises:
        UserError: it is no Llama.
    """
    config = load_config(base)
    if config.model_type != "llama":
        raise UserError(f"base '{base}' must be a Llama, got {config.model_type}.")
    return replace(
        BRIEF,
        name=Path(base).name,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        ffn=config.intermediate_size,
        length=2 * FULL.length,
        window=2 * FULL.window,
        levels=((2 * FULL.length, 0),),
        documents=(10,),
        eval_tokens=64 * 2 * FULL.length,
        questions=150,
        adapt_steps=100,
        base=base,
    )


SMOKE = Size(
    name="smoke",
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=4,
    ffn=64,
    length=256,
    window=32,
    group=4,
    step_tokens=512,
    levels=((128, 2), (256, 2)),
    tune_levels=((128, 1),),
    follow_steps=2,
    adapt_tokens=512,
    adapt_steps=2,
    short_steps=1,
    eval_tokens=1024,
    questions=4,
    groups=(2, 8),
    windows=(16, 64),
    documents=(2,),
    seeds=(0,),
    bases=(0,),
    rates=(1e-3, 2e-3),
    latency_repeats=1,
    latency_rows=2,
)
SIZES = {size.name: size for size in (FULL, BRIEF, SMOKE)}
