"""List the methods that are compared, and how a model is adapted to each."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.head_budget import COARSE, MORE_ENTRIES, Shape, Unit, at_equal_cache
from corecontext.baselines import LMInfinite, StreamingLLM, WindowOnly
from corecontext.config import CCAConfig
from corecontext.visibility import num_complete_groups, window_capacity
from reproduction.attentions.duo_attention import DuoAttention
from reproduction.attentions.minference import MInference, Pattern
from reproduction.attentions.pooled import MaxPooled, MeanPooled, Pooled
from reproduction.real.methods import Sizes
from reproduction.sizes import Size

PAPER_RIVALS = ("window", "window_wide", "streaming_llm", "lm_infinite", "mean", "max")
DUO = ("duo_1", "duo_1_distilled")
RIVALS = (*PAPER_RIVALS, *DUO, "duo_1_distilled_long")
"""Adapted methods that are neither ours nor full attention."""
FINALISTS = ("full", "window", "cca", "raw_1", "raw_1_distilled", "duo_1", "duo_1_distilled")
"""Methods with every seed: the two that gains are measured by, the paper's rule, the best on the
first seed's validation text and its nearest rival."""
SCRATCH = ("full", "cca", "window")
"""Methods trained from scratch, each with its own rate; full attention's models are the base of
every adaptation."""
SCRATCH_FINE = ("raw_1", "duo_1")
"""The same with CCA's rate, and the heads that a base model was found to need."""


class Method(NamedTuple):
    """An attention, and how a model is adapted to it."""

    name: str
    config: Any
    """A CCAConfig, a rival's settings, or None for full attention."""
    title: str
    trains: str = "all"
    """"all" parameters, "qkv" projections alone (paper 3.5), "lora", or "" for none."""
    distil: bool = False
    """Learn from the base model's predictions, too."""
    stretch: int = 1
    """Factor of the steps."""
    rate: float = 1.0
    """Factor of the learning rate."""
    later: bool = False
    """Run from the second seed on, not under the first."""
    fine: tuple[str, int] | None = None
    """Kind and number of the layers or heads that the base model was found to need: small groups
    in "layers" or "heads", every token in heads of "raw" and "duo". `config` has the first ones."""

    @property
    def is_ours(self) -> bool:
        """Whether it is neither full attention nor a rival."""
        return self.config is not None and self.name not in RIVALS


@functools.cache
def methods(size: Size) -> dict[str, Method]:
    """Return every method by name.

    Those with core tokens have the same cache size within 5 %. A brief size has a list of its own,
    in which fetch may have more bytes.
    """
    if size.is_brief:
        adapted = list(_with_masses_and_fetch(size))
        made = [*map(_as_it_is, adapted), *adapted]
        return {method.name: method for method in made}
    made = [
        *_paper(size),
        *_variants(size),
        *_fine_layers(size),
        *_duo(size),
        *_trained_otherwise(size),
        *_not_adapted(size),
    ]
    return {method.name: method for method in made}


def _entries(size: Size, group_size: int) -> int:
    """Return the cache entries of CCA at the trained length."""
    return num_complete_groups(size.length, group_size) + window_capacity(group_size, size.window)


def _cca(size: Size) -> CCAConfig:
    return CCAConfig.paper(group_size=size.group, window_size=size.window)


def _paper(size: Size) -> Iterator[Method]:
    """Yield the paper's methods and training strategies."""
    s = size.window
    cca = _cca(size)
    wide = WindowOnly(window_size=_entries(size, size.group))
    yield Method("full", None, "full attention")
    yield Method("window", WindowOnly(window_size=s), "window alone")
    yield Method("window_wide", wide, "a window as large as CCA's cache")
    yield Method("streaming_llm", StreamingLLM(4, s), "StreamingLLM")
    yield Method("lm_infinite", LMInfinite(min(16, s), s), "LM-Infinite")
    yield Method("mean", MeanPooled(size.group, s), "mean pooling")
    yield Method("max", MaxPooled(size.group, s), "max pooling")
    yield Method("cca", cca, "CCA, the paper's rule")
    yield Method("partial", cca, "CCA, only W_Q, W_K, W_V trained", "qkv")
    yield Method("lora", cca, "CCA, LoRA", "lora")
    yield Method("gentle", cca, "CCA, a quarter of the rate", rate=0.25, later=True)


def _variants(size: Size) -> Iterator[Method]:
    """Yield other rules of CCA."""
    g = size.group
    cca = _cca(size)
    coarse = COARSE * g
    # The window gets the fewer core tokens, less the larger open end of a group.
    window = size.window + _entries(size, g) - _entries(size, coarse)
    wider = cca.replace(group_size=coarse, window_size=window)
    yield Method("coarse", wider, f"CCA, groups of {coarse}, a wider window", later=True)


def _fine_layers(size: Size) -> Iterator[Method]:
    """Yield small groups in the layers or heads that need them, and one head with every token."""
    for count in (1, 2):
        if count < size.layers:
            yield _fine(size, "layers", count, later=True)
    for count in (1, 2):
        yield _fine(size, "heads", count, later=True)
    yield _fine(size, "raw", 1)


def _fine(size: Size, kind: str, count: int, variant: str = "", **more: Any) -> Method:
    """Make a method of CCA with small groups in some layers or heads, large ones in the rest."""
    units = [Unit(i) if kind == "layers" else Unit(0, i) for i in range(count)]
    heads = size.layers * size.kv_heads
    titles = {
        "layers": f"small groups in {count} of {size.layers} layers",
        "heads": f"small groups in {count} of {heads} KV heads",
        "raw": f"{count} of {heads} KV heads keeps every token",
    }
    words = {"gentle": "a quarter of the rate", "long": "four times the steps"}
    config = fine_config(size, kind, units)
    return Method(
        "_".join([f"{kind}_{count}", *variant.split()]),
        config,
        ", ".join([f"CCA, {titles[kind]}", *(words.get(x, x) for x in variant.split())]),
        fine=(kind, count),
        **more,
    )


def _duo(size: Size) -> Iterator[Method]:
    config = fine_config(size, "duo", [Unit(0, 0)])
    title = f"DuoAttention, 1 of {size.layers * size.kv_heads} KV heads keeps every token"
    distilled = {"distil": True, "fine": ("duo", 1), "later": True}
    long = f"{title}, distilled, four times the steps"
    yield Method("duo_1", config, title, fine=("duo", 1))
    yield Method("duo_1_distilled", config, f"{title}, distilled", **distilled)  # type: ignore[arg-type]
    yield Method("duo_1_distilled_long", config, long, stretch=4, **distilled)  # type: ignore[arg-type]


def _trained_otherwise(size: Size) -> Iterator[Method]:
    """Yield sinks, distillation, and longer or gentler training."""
    g = size.group
    cca = _cca(size)
    # g raw tokens in place of one core token cost g - 1 entries, which the window gives up.
    sinks = cca.replace(sink_size=g, window_size=size.window - (g - 1))
    long = "full attention, four times the steps"
    yield Method("sinks", sinks, f"CCA, the first {g} tokens raw", later=True)
    yield Method("distilled", cca, "CCA, distilled", distil=True)
    yield Method("full_long", None, long, stretch=4, later=True)
    yield Method("long", cca, "CCA, four times the steps", stretch=4, later=True)
    yield _fine(size, "raw", 1, "distilled", distil=True)
    yield _fine(size, "raw", 1, "distilled long", distil=True, stretch=4, later=True)
    yield _fine(size, "raw", 1, "distilled gentle", distil=True, rate=0.25, later=True)
    yield _fine(size, "raw", 1, "distilled LoRA", distil=True, trains="lora", later=True)


def _not_adapted(size: Size) -> Iterator[Method]:
    """Yield methods that a base model is measured under as it is."""
    s = size.window
    budget = max(1, size.length // 16)
    pattern = Pattern("vertical_slash", budget, 2 * budget)
    patterns = ((pattern,) * size.heads,) * size.layers
    block = max(1, s // 8)
    minference = MInference(patterns, block_size=block, probe=block)
    streaming_llm = StreamingLLM(4, s)
    lm_infinite = LMInfinite(min(16, s), s)
    yield Method("full_zero", None, "full attention, not adapted", "")
    yield Method("streaming_llm_zero", streaming_llm, "StreamingLLM, not adapted", "")
    yield Method("lm_infinite_zero", lm_infinite, "LM-Infinite, not adapted", "")
    yield Method("minference_zero", minference, "MInference, not adapted", "", later=True)
    yield Method("cca_zero", _cca(size), "CCA, not adapted", "")


def _with_masses_and_fetch(size: Size) -> Iterator[Method]:
    """Yield the ends of the gain, and CCA with masses and with fetch from host memory: first with
    the bytes of CCA on the device, then with its window and more bytes."""
    sizes = Sizes(size.length, size.group, size.window, 0, True, size.window // size.group)
    sizes = replace(sizes, store="host", head_dim=size.hidden // size.heads)
    count = sizes.fetch_groups
    double = replace(sizes, fetch_groups=2 * count)
    wide = sizes.wide_window()
    yield Method("full", None, "full attention")
    yield Method("window", WindowOnly(window_size=size.window), "window alone")
    yield Method("cca", _cca(size), "CCA, the paper's rule")
    yield Method("cca_mass", sizes.cca(), "CCA with mass")
    title = f"CCA with mass, fetch of {count} groups"
    equal = f"{title}, on the device the bytes of CCA"
    yield Method("fetch_equal_bytes", sizes.fetch_equal_bytes(), equal)
    yield Method("fetch", sizes.fetch(), title)
    yield Method("window_wide", WindowOnly(window_size=wide), "a window as large as CCA's cache")
    yield Method("fetch_double", double.fetch(), title.replace(str(count), str(2 * count)))


def _as_it_is(method: Method) -> Method:
    """Return a method under which a base model is measured without training."""
    title = f"{method.title}, not adapted"
    return method._replace(name=f"{method.name}_zero", title=title, trains="")


def alike(known_methods: dict[str, Method], method: Method) -> list[str]:
    """Return the methods with this one's attention, itself among them, which cost the same; a core
    token costs the same however it is pooled."""
    names = [name for name, candidate in known_methods.items() if candidate.config == method.config]
    return [*names, "cca"] if isinstance(method.config, Pooled) else names


def fine_config(size: Size, kind: str, units: Sequence[Unit]) -> CCAConfig | DuoAttention:
    """Return settings with small groups in these layers or heads, at the cache size of the paper's
    rule; "raw" and "duo" heads keep all tokens."""
    if kind != "duo":
        shape = Shape(size.layers, size.kv_heads)
        return at_equal_cache(shape, units, _cca(size), size.length, raw=kind == "raw")
    sinks = 4
    heads = size.layers * size.kv_heads
    allowed = int(MORE_ENTRIES * heads * _entries(size, size.group))
    window = (allowed - len(units) * size.length) // (heads - len(units)) - sinks
    raw_heads = tuple(
        tuple(unit.head for unit in units if unit.layer == layer and unit.head is not None)
        for layer in range(size.layers)
    )
    return DuoAttention(raw_heads, sinks, window)
