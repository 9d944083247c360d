"""List the stages of the reproduction in order, with their dependencies."""

from collections.abc import Iterator
from typing import NamedTuple

from corecontext.files import UserError
from reproduction.methods import FINALISTS, SCRATCH, SCRATCH_FINE, Method, methods
from reproduction.sizes import Size


class Stage(NamedTuple):
    """A piece of work with records of its own."""

    name: str
    kind: str
    """The function that runs it, by its name in `stages.KINDS`."""
    needs: tuple[str, ...] = ()
    seed: int = 0
    method: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    """group_size or window_size in place of the method's."""
    lr: float = 0.0
    """The rate that is tried; from scratch, the rate where none are tried."""


def stages(size: Size, finalists: tuple[str, ...] = ()) -> list[Stage]:
    """Return all stages in order.

    Args:
        finalists: More methods to run with every seed.

    Raises:
        UserError: a finalist is no method that is adapted.
    """
    adaptable = [name for name, method in methods(size).items() if method.trains]
    for name in finalists:
        if name not in adaptable:
            raise UserError(f"finalist must be one of {', '.join(adaptable)}, got {name!r}.")
    if size.is_brief:
        return list(_brief(size))
    plan = [Stage("prepare", "prepare"), Stage("cost", "cost", (), size.seeds[0])]
    for seed in size.seeds:
        plan += _of_seed(size, seed, (*FINALISTS, *finalists))
    for base_seed in dict.fromkeys(size.bases):
        for name in SCRATCH_FINE:
            stage = _scratch(size, name, base_seed, "cca")
            plan.append(stage._replace(needs=(*stage.needs, layers_of(size, base_seed))))
    return plan


def _brief(size: Size) -> Iterator[Stage]:
    """Yield the stages of a brief size: one base, measured as it is first, then adapted."""
    seed = size.seeds[0]
    base = base_of(size, seed)
    yield Stage("prepare", "prepare")
    if size.base is None:
        yield Stage(base, "scratch", ("prepare",), seed, "full", lr=size.rates[0])
    else:
        base = "prepare"
    for method in methods(size).values():
        kind = "adapt" if method.trains else "zero"
        yield Stage(adapted(method.name, seed), kind, (base,), seed, method.name)
    yield Stage("cost", "cost", (), seed)


def _of_seed(size: Size, seed: int, finalists: tuple[str, ...]) -> Iterator[Stage]:
    """Yield the stages of one seed: base model, adaptations, sizes, and other trainings."""
    number = size.seeds.index(seed)
    first, second = size.seeds[0], later_seed(size)
    base = base_of(size, seed)
    layers = layers_of(size, seed)
    base_seed = size.bases[number]
    is_new = base_seed not in size.bases[:number]
    if is_new:
        if seed == first:
            yield from _tries(size, "full")
        yield _scratch(size, "full", base_seed, "full")
        yield Stage(layers, "layers", (base,), seed)
    for method in methods(size).values():
        earliest = size.seeds.index(first_seed(size, method))
        if number == earliest or (number > earliest and method.name in finalists):
            kind = "adapt" if method.trains else "zero"
            needs = (base, layers) if method.fine else (base,)
            yield Stage(adapted(method.name, seed), kind, needs, seed, method.name)
    if seed == second:
        for g in size.groups:
            yield Stage(f"g{g}-{seed}", "adapt", (base,), seed, "cca", (("group_size", g),))
        for s in size.windows:
            yield Stage(f"s{s}-{seed}", "adapt", (base,), seed, "cca", (("window_size", s),))
        yield Stage("from-short", "short", (base,), seed, "cca")
        yield Stage("flexibility-base", "flexibility", (base,), seed, "cca_zero")
    if seed == first:
        cca = adapted("cca", seed)
        yield Stage("flexibility", "flexibility", (cca,), seed, "cca")
        yield Stage("cloze", "cloze", (cca, adapted("full", seed)), seed)
        yield Stage("maps", "maps", (base,), seed)
    if is_new:
        for name in SCRATCH:
            if name != "full":
                if seed == first:
                    yield from _tries(size, name)
                yield _scratch(size, name, base_seed, name)


def _tries(size: Size, name: str) -> list[Stage]:
    """Return the trials of each rate."""
    return [Stage(tuned(name, lr), "tune", ("prepare",), 0, name, lr=lr) for lr in size.rates]


def _scratch(size: Size, name: str, seed: int, like: str) -> Stage:
    """Return training from scratch, at the best of the rates tried for the method `like`."""
    needs = tuple(stage.name for stage in _tries(size, like))
    return Stage(from_scratch(name, seed), "scratch", needs, seed, name)


def adapt_steps(size: Size, stage: Stage, method: Method) -> int:
    """Return the steps of an adaptation: fewer of a size, and from a model of short contexts."""
    is_short = bool(stage.sizes) or stage.kind == "short"
    return (size.short_steps if is_short else size.adapt_steps) * method.stretch


def trained_tokens(size: Size, stage: Stage, method: Method) -> int | None:
    """Return the tokens that a stage's model was trained on, its base's too unless that was given;
    None where the stage measures models of several stages, or none."""
    levels = {"tune": size.tune_levels, "short": size.levels[:-1]}.get(stage.kind, size.levels)
    base = size.step_tokens * sum(count for _, count in levels)
    if stage.kind in ("tune", "scratch", "zero"):
        return base
    if stage.kind in ("adapt", "short"):
        return base + size.adapt_tokens * adapt_steps(size, stage, method)
    return None


def sizes_of(size: Size) -> list[tuple[int, int]]:
    """Return every (g, s) whose cost is measured: the grid at test time, and Tables 8 and 9."""
    grid = [(g, s) for g in size.groups for s in size.windows]
    by_group = [(g, size.window) for g in size.groups]
    by_window = [(size.group, s) for s in size.windows]
    return list(dict.fromkeys(grid + by_group + by_window))


def later_seed(size: Size) -> int:
    """Return the second seed, where there is one."""
    return size.seeds[min(1, len(size.seeds) - 1)]


def first_seed(size: Size, method: Method) -> int:
    """Return the first seed of a method."""
    return later_seed(size) if method.later else size.seeds[0]


def base_of(size: Size, seed: int) -> str:
    """Return the stage whose model, trained with full attention, is adapted under a seed."""
    return from_scratch("full", size.bases[size.seeds.index(seed)])


def layers_of(size: Size, seed: int) -> str:
    """Return the stage that finds the layers and heads of this model that need small groups."""
    return base_of(size, seed).replace("base", "layers")


def adapted(method: str, seed: int) -> str:
    """Return the stage that adapts a base model to a method, or measures it under the method."""
    return f"{method}-{seed}"


def from_scratch(method: str, seed: int) -> str:
    """Return the stage that trains a model with a method from random weights."""
    return f"base-{seed}" if method == "full" else f"scratch-{method}-{seed}"


def tuned(method: str, rate: float) -> str:
    """Return the stage that tries a rate."""
    return f"tune-{method}-{rate:g}"
