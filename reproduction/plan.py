"""What is run: the sizes of the miniature, its methods, and its stages in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from corecontext.baselines import (
    DuoAttention,
    LMInfinite,
    MInference,
    Pattern,
    StreamingLLM,
    WindowOnly,
)
from corecontext.config import LEARNED, CCAConfig
from corecontext.files import UserError
from corecontext.heads.budget import COARSE, MORE_ENTRIES, Shape, Unit, at_equal_cache
from corecontext.visibility import num_complete_groups, window_capacity


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
    """Contexts of training from scratch and the steps at each: the same tokens in the same order
    for every method."""
    tune_levels: tuple[tuple[int, int], ...]
    """The same for choosing a rate."""
    follow_steps: int
    """Steps from scratch between two looks at held-out text."""
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
    """The seed of the base model, trained from scratch, that each of them adapts, with batches of
    its own."""
    rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    """Rates from scratch, of which each method takes its best."""
    adapt_lr: float = 1e-3
    latency_repeats: int = 5
    latency_rows: int = 16
    """Prompts that are read at once when time is taken: one of a model this small would be launches
    alone."""


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
SIZES = {one.name: one for one in (FULL, SMOKE)}


class Method(NamedTuple):
    """An attention, and how a model is adapted to it."""

    name: str
    config: Any
    """A CCAConfig, a rival's settings, or None for full attention."""
    title: str
    trains: str = "all"
    """"all" parameters, "qkv" projections alone (paper 3.5), "lora", or "" for none: as the base
    model is."""
    distil: bool = False
    """Learn from the base model's predictions, too."""
    stretch: int = 1
    """Times the steps of others."""
    rate: float = 1.0
    """Times the rate of others."""
    later: bool = False
    """Not under the first seed: under the second, finalists under all from there on."""
    fine: tuple[str, int] | None = None
    """Small groups in so many "layers" or "heads", or so many heads with every token ("raw", and
    "duo" without core tokens): those that the base model was found to need. `config` has them in
    the first ones."""


def methods(size: Size) -> dict[str, Method]:
    """Every method of the tables, by name; those with core tokens have the same cache size within 5
    %, with those by query head 10 %: longer groups leave more tokens that have none yet."""
    g, s, r = size.group, size.window, size.heads // size.kv_heads
    cca = CCAConfig(group_size=g, window_size=s)

    def small_groups(
        kind: str, count: int, what: str = "", parameters: tuple[str, ...] = (), **more: Any
    ) -> Method:
        """What was found has small groups, the rest large ones."""
        units = [Unit(i) if kind == "layers" else Unit(0, i) for i in range(count)]
        title = {
            "layers": f"small groups in {count} of {size.layers} layers",
            "heads": f"small groups in {count} of {size.layers * size.kv_heads} KV heads",
            "raw": f"{count} of {size.layers * size.kv_heads} KV heads keeps every token",
        }[kind]
        said = {"gentle": "a quarter of the rate", "long": "four times the steps"}
        config = fine_config(size, kind, units)
        assert isinstance(config, CCAConfig)
        return Method(
            "_".join([f"{kind}_{count}", *what.split()]),
            config.replace(learned=parameters),
            ", ".join([f"CCA, {title}", *(said.get(one, one) for one in what.split())]),
            fine=(kind, count),
            **more,
        )

    learned, coarse = cca.replace(learned=LEARNED), COARSE * g
    entries = lambda g: num_complete_groups(size.length, g) + window_capacity(g, s)  # noqa: E731
    duo = fine_config(size, "duo", [Unit(0, 0)])
    duo_title = f"DuoAttention, 1 of {size.layers * size.kv_heads} KV heads keeps every token"
    found = [
        Method("full", None, "full attention"),
        Method("window", WindowOnly(window_size=s), "window alone"),
        Method(
            "window_wide",
            WindowOnly(window_size=num_complete_groups(size.length, g) + window_capacity(g, s)),
            "a window as large as CCA's cache",
        ),
        Method("streaming_llm", StreamingLLM(4, s), "StreamingLLM"),
        Method("lm_infinite", LMInfinite(min(16, s), s), "LM-Infinite"),
        Method("mean", cca.replace(pooling="mean"), "mean pooling"),
        Method("max", cca.replace(pooling="max"), "max pooling"),
        Method("cca", cca, "CCA, the paper's rule"),
        Method("partial", cca, "CCA, only W_Q, W_K, W_V trained", "qkv"),
        Method("lora", cca, "CCA, LoRA", "lora"),
        Method("gentle", cca, "CCA, a quarter of the rate", rate=0.25, later=True),
        # A larger group has a larger open end, too; both and the fewer core tokens are what the
        # window gets.
        Method(
            "coarse",
            cca.replace(group_size=coarse, window_size=s + entries(g) - entries(coarse)),
            f"CCA, groups of {coarse}, a wider window",
            later=True,
        ),
        Method("log_g", cca.replace(core_bias=math.log(g)), "CCA + log g", later=True),
        Method("mean_query", cca.replace(pooling="mean_query"), "CCA, mean query", later=True),
        Method(
            "query_heads",
            cca.replace(group_size=g * r, core_heads="query"),
            f"CCA by query head, groups of {g * r}",
            later=True,
        ),
        *(small_groups("layers", count, later=True) for count in (1, 2) if count < size.layers),
        *(small_groups("heads", count, later=True) for count in (1, 2)),
        small_groups("raw", 1),
        Method("duo_1", duo, duo_title, fine=("duo", 1)),
        Method(
            "duo_1_distilled",
            duo,
            f"{duo_title}, distilled",
            distil=True,
            fine=("duo", 1),
            later=True,
        ),
        Method(
            "duo_1_distilled_long",
            duo,
            f"{duo_title}, distilled, four times the steps",
            distil=True,
            stretch=4,
            fine=("duo", 1),
            later=True,
        ),
        # g raw tokens in place of one core token cost g - 1 entries, which the window gives up.
        Method(
            "sinks",
            cca.replace(sink_size=g, window_size=s - (g - 1)),
            f"CCA, the first {g} tokens raw",
            later=True,
        ),
        Method("learned", learned, "CCA, all learned parameters"),
        Method("distilled", cca, "CCA, distilled", distil=True),
        Method("full_long", None, "full attention, four times the steps", stretch=4, later=True),
        Method("long", cca, "CCA, four times the steps", stretch=4, later=True),
        small_groups("raw", 1, "learned", LEARNED),
        small_groups("raw", 1, "distilled", distil=True),
        small_groups("raw", 1, "learned distilled", LEARNED, distil=True, later=True),
        small_groups("raw", 1, "distilled long", distil=True, stretch=4, later=True),
        small_groups("raw", 1, "distilled gentle", distil=True, rate=0.25, later=True),
        small_groups("raw", 1, "distilled LoRA", distil=True, trains="lora", later=True),
    ]
    budget = max(1, size.length // 16)
    pattern = Pattern("vertical_slash", budget, 2 * budget)
    zero = [
        Method("full_zero", None, "full attention, not adapted", ""),
        Method("streaming_llm_zero", StreamingLLM(4, s), "StreamingLLM, not adapted", ""),
        Method("lm_infinite_zero", LMInfinite(min(16, s), s), "LM-Infinite, not adapted", ""),
        Method(
            "minference_zero",
            MInference(
                ((pattern,) * size.heads,) * size.layers,
                block_size=max(1, s // 8),
                probe=max(1, s // 8),
            ),
            "MInference, not adapted",
            "",
            later=True,
        ),
        Method("cca_zero", cca, "CCA, not adapted", ""),
    ]
    return {one.name: one for one in found + zero}


def alike(known: dict[str, Method], method: Method) -> list[str]:
    """The methods with this one's attention, itself among them: what it costs does not depend on
    how its weights were trained."""
    return [one.name for one in known.values() if one.config == method.config]


def fine_config(size: Size, kind: str, units: Sequence[Unit]) -> CCAConfig | DuoAttention:
    """Small groups in these layers or heads ("raw" and "duo": all tokens), with a cache as large as
    the paper's rule has."""
    if kind == "duo":
        heads, sinks = size.layers * size.kv_heads, 4
        equal = heads * (
            num_complete_groups(size.length, size.group) + window_capacity(size.group, size.window)
        )
        window = (
            int(MORE_ENTRIES * equal - len(units) * size.length) // (heads - len(units)) - sinks
        )
        return DuoAttention(
            tuple(
                tuple(unit.head for unit in units if unit.layer == layer and unit.head is not None)
                for layer in range(size.layers)
            ),
            sinks,
            window,
        )
    return at_equal_cache(
        Shape(size.layers, size.kv_heads),
        units,
        CCAConfig(size.group, size.window),
        size.length,
        raw=kind == "raw",
    )


PAPER_RIVALS = ("window", "window_wide", "streaming_llm", "lm_infinite", "mean", "max")
DUO = ("duo_1", "duo_1_distilled")
RIVALS = (*PAPER_RIVALS, *DUO, "duo_1_distilled_long")
"""Adapted methods that are neither ours nor full attention."""
FINALISTS = ("full", "window", "cca", "raw_1", "raw_1_distilled", "duo_1", "duo_1_distilled")
"""Run with every seed: what gains are measured by, the paper's rule, what was best on the first
seed's validation text and what comes nearest to it."""
SCRATCH = ("full", "cca", "window")
"""Methods trained from scratch, each with its own rate; full attention's models are the base of
every adaptation."""
SCRATCH_FINE = ("raw_1", "duo_1")
"""The same with CCA's rate, and the heads that a base model was found to need."""


def sizes_of(size: Size) -> list[tuple[int, int]]:
    """Every (g, s) whose cost is asked for: the grid at test time, and Tables 8 and 9."""
    found = [(g, s) for g in size.groups for s in size.windows]
    more = [*((g, size.window) for g in size.groups), *((size.group, s) for s in size.windows)]
    return found + [one for one in dict.fromkeys(more) if one not in found]


class Stage(NamedTuple):
    """A piece of work with records of its own."""

    name: str
    kind: str
    needs: tuple[str, ...] = ()
    seed: int = 0
    method: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    """group_size or window_size in place of the method's."""
    lr: float = 0.0
    """The rate that is tried."""


def stages(size: Size, finalists: tuple[str, ...] = ()) -> list[Stage]:
    """All stages in order.

    Args:
        finalists: More methods to be run with every seed.

    Raises:
        UserError: a finalist is no method that is adapted.
    """
    known, first, second = methods(size), size.seeds[0], later_seed(size)
    for name in finalists:
        if name not in known or not known[name].trains:
            raise UserError(
                f"finalist must be one of {', '.join(m.name for m in known.values() if m.trains)}, got "
                f"{name!r}."
            )
    found = [Stage("prepare", "prepare"), Stage("cost", "cost", (), first)]

    def tries(name: str) -> list[Stage]:
        return [
            Stage(tuned(name, rate), "tune", ("prepare",), 0, name, lr=rate) for rate in size.rates
        ]

    def scratch(name: str, seed: int, like: str) -> Stage:
        """With the rate that is best of those tried for the method `like`."""
        return Stage(
            from_scratch(name, seed), "scratch", tuple(one.name for one in tries(like)), seed, name
        )

    for number, seed in enumerate(size.seeds):
        base, layers, own = base_of(size, seed), layers_of(size, seed), size.bases[number]
        is_new = own not in size.bases[:number]
        if is_new:
            found += [
                *(tries("full") if seed == first else ()),
                scratch("full", own, "full"),
                Stage(layers, "layers", (base,), seed),
            ]
        for one in known.values():
            earliest = size.seeds.index(first_seed(size, one))
            if number == earliest or (number > earliest and one.name in (*FINALISTS, *finalists)):
                found.append(
                    Stage(
                        adapted(one.name, seed),
                        "adapt" if one.trains else "zero",
                        (base, layers) if one.fine else (base,),
                        seed,
                        one.name,
                    )
                )
        if seed == second:
            found += [
                Stage(f"g{g}-{seed}", "adapt", (base,), seed, "cca", (("group_size", g),))
                for g in size.groups
            ]
            found += [
                Stage(f"s{s}-{seed}", "adapt", (base,), seed, "cca", (("window_size", s),))
                for s in size.windows
            ]
            found += [
                Stage("from-short", "short", (base,), seed, "cca"),
                Stage("flexibility-base", "flexibility", (base,), seed, "cca_zero"),
            ]
        if seed == first:
            ours = adapted("cca", seed)
            found += [
                Stage("flexibility", "flexibility", (ours,), seed, "cca"),
                Stage("cloze", "cloze", (ours, adapted("full", seed)), seed),
                Stage("maps", "maps", (base,), seed),
            ]
        for name in SCRATCH if is_new else ():
            if name != "full":
                found += [*(tries(name) if seed == first else ()), scratch(name, own, name)]
    for own in dict.fromkeys(size.bases):
        fine = [scratch(name, own, "cca") for name in SCRATCH_FINE]
        found += [one._replace(needs=(*one.needs, layers_of(size, own))) for one in fine]
    return found


def later_seed(size: Size) -> int:
    """The second seed, where there is one."""
    return size.seeds[min(1, len(size.seeds) - 1)]


def first_seed(size: Size, method: Method) -> int:
    """The first seed that a method has."""
    return later_seed(size) if method.later else size.seeds[0]


def base_of(size: Size, seed: int) -> str:
    """Name of the stage whose model, trained with full attention, is adapted under a seed."""
    return from_scratch("full", size.bases[size.seeds.index(seed)])


def layers_of(size: Size, seed: int) -> str:
    """Name of the stage that finds the layers and heads of this model that need small groups."""
    return base_of(size, seed).replace("base", "layers")


def adapted(method: str, seed: int) -> str:
    """Name of the stage that brings a base model to a method, or measures it under one."""
    return f"{method}-{seed}"


def from_scratch(method: str, seed: int) -> str:
    """Name of the stage that trains a model with a method from random weights."""
    return f"base-{seed}" if method == "full" else f"scratch-{method}-{seed}"


def tuned(method: str, rate: float) -> str:
    """Name of the stage that tries a rate."""
    return f"tune-{method}-{rate:g}"
