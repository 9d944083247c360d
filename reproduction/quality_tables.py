"""Write the tables of the miniature's quality: a line for each method, from its stages' records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.tables import Column, markdown, mean_and_spread
from corecontext.record import Record
from corecontext.serve.settings import BUNDLED
from reproduction.methods import SCRATCH, SCRATCH_FINE, Method, alike, methods
from reproduction.plan import adapted, from_scratch
from reproduction.sizes import BRIEF, FULL, Size, brief_of

SHORT = ("full", "window", "window_wide", "duo_1", "cca", "distilled", "raw_1", "raw_1_distilled")
"""Methods of the short table."""


class Line(NamedTuple):
    """A method's measurements on held-out test text, by seed."""

    method: Method
    by_seed: dict[int, dict[str, float]]
    gains: list[float]
    """Shares of full attention's gain over a window, of the seeds that have both ends."""
    cache: Record | None


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
        + _Results(records, FULL, adapted).table(chosen)
    )


def scratch_markdown(records: Sequence[Record]) -> str:
    """Return the table of models trained from scratch, with gains between such models."""
    by_name = methods(FULL)
    chosen = [by_name[name] for name in (*SCRATCH, *SCRATCH_FINE)]
    return _Results(records, FULL, from_scratch).table(chosen)


def brief_markdown(records: Sequence[Record], size: Size = BRIEF) -> str:
    """Return the table of a brief size; 0 and 100 % are trained, or not trained, as the method."""
    return _Results(records, size, adapted).table(list(methods(size).values()))


def bundled_markdown(records: Sequence[Record]) -> str:
    """Return the table of the brief size around the bundled model."""
    size = brief_of(str(BUNDLED))
    return (
        f"Far: the second half of windows of {size.length} bytes, one token each. Gain kept: 0 is "
        f"the window of {size.window} tokens alone, 100 % is full attention, both trained, or not, "
        "as the method.\n\n" + brief_markdown(records, size)
    )


class _Results(NamedTuple):
    """The records of a size's stages."""

    records: Sequence[Record]
    size: Size
    stage: Callable[[str, int], str]
    """Names the stage of a method and a seed."""

    def table(self, chosen: Sequence[Method]) -> str:
        """Return a line for each method that was run."""
        lines = [self._line(method) for method in chosen]
        lines = [line for line in lines if line.by_seed]
        columns = [
            Column("", lambda line: line.method.title, left=True),
            Column("seeds", lambda line: ", ".join(map(str, line.by_seed)), left=True),
            Column("perplexity, far", _perplexity),
            Column(
                "gain kept", lambda line: mean_and_spread([100 * x for x in line.gains], "{:.1f} %")
            ),
            Column("facts found beyond the window", partial(_shares, "facts")),
            Column(f"facts in {self.size.documents[-1]} passages", partial(_shares, "passages")),
            Column("cache, MiB", _cache),
        ]
        if any("host_bytes" in line.cache.params for line in lines if line.cache):
            columns.append(Column("in host memory, MiB", _host_cache))
        return "\n".join(markdown(columns, lines)) + "\n"

    def _line(self, method: Method) -> Line:
        """Collect a method's measurements of every seed."""
        by_seed = {}
        gains = []
        ending = ""
        if self.size.is_brief and not method.trains:
            ending = "_zero"
        ends = [f"{name}{ending}" for name in ("window", "full")]
        for seed in self.size.seeds:
            values = self._values(self.stage(method.name, seed))
            if not values:
                continue
            by_seed[seed] = values
            window, full = (self._values(self.stage(name, seed)) for name in ends)
            if window and full and method.name not in ends:
                gain = math.log(window["far"] / values["far"])
                gains.append(gain / math.log(window["far"] / full["far"]))
        return Line(method, by_seed, gains, self._cache(method))

    def _values(self, stage: str) -> dict[str, float]:
        """Return the newest values of a stage by measure; empty where it was not run."""
        measures = {
            "far": {"split": "test", "bucket": "far"},
            "facts": {"distance": "far", "length": self.size.length},
            "passages": {"task": "multidoc_planted", "documents": self.size.documents[-1]},
        }
        values = {}
        for record in self.records:
            p = record.params
            if p.get("stage") != stage or record.name == "quality.gain_kept":
                continue
            if not self._is_of_size(record):
                continue
            for name, params in measures.items():
                if all(p.get(key) == value for key, value in params.items()):
                    values[name] = record.value
        return values

    def _cache(self, method: Method) -> Record | None:
        """Return the newest record of the cache size of one text of the trained length."""
        names = alike(methods(self.size), method)
        for record in reversed(self.records):
            p = record.params
            of_methods = record.name == "model.cache_bytes" and p.get("of") == "methods"
            if of_methods and p["method"] in names and self._is_of_size(record):
                return record
        return None

    def _is_of_size(self, record: Record) -> bool:
        """Whether a record is of this size's models."""
        return record.params.get("model", self.size.name) == self.size.name


def _shares(name: str, line: Line) -> str:
    values = [values[name] for values in line.by_seed.values() if name in values]
    return mean_and_spread([100 * value for value in values], "{:.1f} %")


def _gain(line: Line) -> str:
    return mean_and_spread([100 * gain for gain in line.gains], "{:.1f} %")


def _perplexity(line: Line) -> str:
    return mean_and_spread([values["far"] for values in line.by_seed.values()], "{:.3f}")


def _cache(line: Line) -> str:
    return "" if line.cache is None else f"{line.cache.value / 2**20:.2f}"


def _host_cache(line: Line) -> str:
    return "" if line.cache is None else f"{line.cache.params.get('host_bytes', 0) / 2**20:.2f}"
