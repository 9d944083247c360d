"""The miniature's result in Markdown, for README and docs: one line a method, from the records of
its stages.

`python -m reproduction.readme_tables` writes the tables anew.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.figures import PageTable, update_pages
from corecontext.record import Record
from reproduction.methods import SCRATCH, SCRATCH_FINE, Method, alike, methods
from reproduction.plan import adapted, from_scratch
from reproduction.sizes import SIZES

SHORT = ("full", "window", "window_wide", "duo_1", "cca", "distilled", "raw_1", "raw_1_distilled")
"""Of README."""


def quality_markdown(records: Sequence[Record], names: Sequence[str] = ()) -> str:
    """Every adapted method, or these: perplexity far from the beginning, the share of full
    attention's gain over a window that it keeps, what it finds; means over its seeds, the newest
    record of each stage."""
    size = SIZES["mini"]
    chosen = [
        one for one in methods(size).values() if one.trains and (not names or one.name in names)
    ]
    return (
        f"Far: the second half of windows of {size.length} tokens. Gain kept: 0 is the window of {size.window} "
        "tokens alone, 100 % is full attention.\n\n" + _table(records, chosen, adapted)
    )


def scratch_markdown(records: Sequence[Record]) -> str:
    """The same for models trained from random weights, each measured by the window and full
    attention so trained."""
    known = methods(SIZES["mini"])
    return _table(records, [known[name] for name in (*SCRATCH, *SCRATCH_FINE)], from_scratch)


def _table(
    records: Sequence[Record], chosen: Sequence[Method], stage: Callable[[str, int], str]
) -> str:
    """A line for each method that has been run; `stage` names that of a method and a seed."""
    size = SIZES["mini"]
    lines = [
        "| | seeds | perplexity, far | gain kept | facts found beyond the window | facts in "
        f"{size.documents[-1]} passages | cache, MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in chosen:
        found = {
            seed: values for seed in size.seeds if (values := _of(records, stage(one.name, seed)))
        }
        if not found:
            continue
        ends = {
            seed: (_of(records, stage("window", seed)), _of(records, stage("full", seed)))
            for seed in found
        }
        gains = [
            math.log(window["far"] / found[seed]["far"]) / math.log(window["far"] / full["far"])
            for seed, (window, full) in ends.items()
            if window and full and one.name not in ("full", "window")
        ]
        cells = [
            one.title,
            ", ".join(map(str, found)),
            _shown([x["far"] for x in found.values()], "{:.3f}"),
            _shown([100 * x for x in gains], "{:.1f} %"),
            *(
                _shown([100 * x[what] for x in found.values() if what in x], "{:.1f} %")
                for what in ("facts", "passages")
            ),
            _cache(records, one),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _of(records: Sequence[Record], stage: str) -> dict[str, float]:
    """What a stage measured on held-out test text, by short names; empty where it has not been
    run."""
    size, found = SIZES["mini"], {}
    wanted = {
        "far": {"split": "test", "bucket": "far"},
        "facts": {"distance": "far", "length": size.length},
        "passages": {"task": "multidoc_planted", "documents": size.documents[-1]},
    }
    for one in records:
        for name, params in wanted.items():
            if (
                one.params.get("stage") == stage
                and all(one.params.get(key) == value for key, value in params.items())
                and one.name != "quality.gain_kept"
            ):
                found[name] = one.value
    return found


def _shown(values: Sequence[float], form: str) -> str:
    """The mean, and from two values on the spread between seeds."""
    if not values:
        return ""
    return form.format(fmean(values)) + (
        f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    )


def _cache(records: Sequence[Record], method: Method) -> str:
    """Of one text of the trained length."""
    names = alike(methods(SIZES["mini"]), method)
    held = [
        one.value
        for one in records
        if one.name == "model.cache_bytes"
        and one.params.get("of") == "methods"
        and one.params["method"] in names
    ]
    return f"{held[-1] / 2**20:.2f}" if held else ""


TABLES: Sequence[PageTable] = (
    PageTable("quality", "quality", quality_markdown),
    PageTable("quality, scratch", "quality", scratch_markdown),
    PageTable("quality, short", "quality", partial(quality_markdown, names=SHORT)),
)

if __name__ == "__main__":
    sys.exit(update_pages("README.md", Path("results"), TABLES))
