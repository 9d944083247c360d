"""Write the tables of README and docs about quality: the miniature's, one line a method from its
stages' records, and those of a pretrained model.

`python -m reproduction.readme_tables` writes the tables anew, and draws results/real.svg.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from benchmarks.figures import PageTable, update_pages
from benchmarks.tables import Column, markdown
from corecontext.record import Record, read_records
from reproduction.methods import SCRATCH, SCRATCH_FINE, Method, alike, methods
from reproduction.plan import adapted, from_scratch
from reproduction.real_figure import draw_frontier
from reproduction.real_tables import extended_markdown, index_markdown, real_markdown
from reproduction.rivals_tables import rivals_markdown
from reproduction.sizes import FULL

SHORT = ("full", "window", "window_wide", "duo_1", "cca", "distilled", "raw_1", "raw_1_distilled")
"""Methods of the short table."""
MEASURES = {
    "far": {"split": "test", "bucket": "far"},
    "facts": {"distance": "far", "length": FULL.length},
    "passages": {"task": "multidoc_planted", "documents": FULL.documents[-1]},
}
"""Params of the records that the tables show."""


class Line(NamedTuple):
    """A method's measurements on held-out test text, by seed."""

    method: Method
    by_seed: dict[int, dict[str, float]]
    gains: list[float]
    """Shares of full attention's gain over a window, of the seeds that have both ends."""
    cache_bytes: float | None


def quality_markdown(records: Sequence[Record], names: Sequence[str] = ()) -> str:
    """Return the table of adapted methods, or of some of them; means over the seeds."""
    chosen = [
        method
        for method in methods(FULL).values()
        if method.trains and (not names or method.name in names)
    ]
    return (
        f"Far: the second half of windows of {FULL.length} tokens. Gain kept: 0 is the window of "
        f"{FULL.window} tokens alone, 100 % is full attention.\n\n"
        + _table(records, chosen, adapted)
    )


def scratch_markdown(records: Sequence[Record]) -> str:
    """Return the table of models trained from scratch, with gains between such models."""
    by_name = methods(FULL)
    return _table(records, [by_name[name] for name in (*SCRATCH, *SCRATCH_FINE)], from_scratch)


def _table(
    records: Sequence[Record], chosen: Sequence[Method], stage: Callable[[str, int], str]
) -> str:
    """Return a line for each method that was run; `stage` names that of a method and a seed."""

    def shares(name: str, line: Line) -> str:
        values = [values[name] for values in line.by_seed.values() if name in values]
        return _mean([100 * value for value in values], "{:.1f} %")

    def perplexity(line: Line) -> str:
        return _mean([values["far"] for values in line.by_seed.values()], "{:.3f}")

    def cache(line: Line) -> str:
        return "" if line.cache_bytes is None else f"{line.cache_bytes / 2**20:.2f}"

    columns = [
        Column("", lambda line: line.method.title, left=True),
        Column("seeds", lambda line: ", ".join(map(str, line.by_seed)), left=True),
        Column("perplexity, far", perplexity),
        Column("gain kept", lambda line: _mean([100 * x for x in line.gains], "{:.1f} %")),
        Column("facts found beyond the window", partial(shares, "facts")),
        Column(f"facts in {FULL.documents[-1]} passages", partial(shares, "passages")),
        Column("cache, MiB", cache),
    ]
    lines = [_line(records, method, stage) for method in chosen]
    return "\n".join(markdown(columns, [line for line in lines if line.by_seed])) + "\n"


def _line(records: Sequence[Record], method: Method, stage: Callable[[str, int], str]) -> Line:
    """Collect a method's measurements of every seed."""
    by_seed = {}
    gains = []
    for seed in FULL.seeds:
        values = _values(records, stage(method.name, seed))
        if not values:
            continue
        by_seed[seed] = values
        window = _values(records, stage("window", seed))
        full = _values(records, stage("full", seed))
        if window and full and method.name not in ("full", "window"):
            gain = math.log(window["far"] / values["far"])
            gains.append(gain / math.log(window["far"] / full["far"]))
    return Line(method, by_seed, gains, _cache_bytes(records, method))


def _values(records: Sequence[Record], stage: str) -> dict[str, float]:
    """Return the newest values of a stage by measure; empty where it was not run."""
    values = {}
    for record in records:
        p = record.params
        if p.get("stage") != stage or record.name == "quality.gain_kept":
            continue
        for name, params in MEASURES.items():
            if all(p.get(key) == value for key, value in params.items()):
                values[name] = record.value
    return values


def _mean(values: Sequence[float], form: str) -> str:
    """Show the mean, and from two values on the spread between seeds."""
    if not values:
        return ""
    spread = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return form.format(fmean(values)) + spread


def _cache_bytes(records: Sequence[Record], method: Method) -> float | None:
    """Return the newest cache size of one text of the trained length."""
    names = alike(methods(FULL), method)
    for record in reversed(records):
        p = record.params
        of_methods = record.name == "model.cache_bytes" and p.get("of") == "methods"
        if of_methods and p["method"] in names:
            return record.value
    return None


TABLES: Sequence[PageTable] = (
    PageTable("quality", "quality", quality_markdown),
    PageTable("quality, scratch", "quality", scratch_markdown),
    PageTable("quality, short", "quality", partial(quality_markdown, names=SHORT)),
    PageTable("real, as it is", "real", partial(real_markdown, trained=False)),
    PageTable("real, trained", "real", partial(real_markdown, trained=True)),
    PageTable("real, short", "real", partial(real_markdown, trained=False, short=True)),
    PageTable("real, indices", "real", index_markdown),
    PageTable("real, extended", "real", extended_markdown),
    PageTable("rivals, as it is", "rivals", partial(rivals_markdown, trained=False)),
    PageTable("rivals, trained", "rivals", partial(rivals_markdown, trained=True)),
)

if __name__ == "__main__":
    update_pages("README.md", Path("results"), TABLES)
    draw_frontier(read_records("results/real.jsonl"), "results/real.svg")
