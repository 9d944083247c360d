"""Write the tables of the miniature's quality: a line for each method, from its stages' records."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.tables import Column, markdown, mean, mean_and_spread
from corecontext.record import Record, newest
from corecontext.serve.settings import BUNDLED
from reproduction.methods import SCRATCH, SCRATCH_FINE, Method, alike, methods
from reproduction.plan import adapted, from_scratch
from reproduction.sizes import BRIEF, FULL, Size, brief_of

FAR = {"name": "quality.perplexity", "split": "test", "bucket": "far"}
SHORT = ("full", "window", "window_wide", "duo_1", "cca", "distilled", "raw_1", "raw_1_distilled")
"""Methods of the short table."""


class Line(NamedTuple):
    """A method's measurements on held-out test text."""

    method: Method
    row: list[Record]
    """Of all seeds."""
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
        lines = [line for line in lines if line.row]
        documents = self.size.documents[-1]
        accuracy = partial(mean, name="quality.accuracy", form="{:.1f} %", scale=100)
        passages = {"task": "multidoc_planted", "documents": documents}
        facts = accuracy("facts found beyond the window", distance="far", length=self.size.length)
        gains = lambda line: [100 * gain for gain in line.gains]  # noqa: E731
        columns = [
            Column("", lambda line: line.method.title, left=True),
            Column("seeds", _seeds, left=True),
            _of_row(mean("perplexity, far", form="{:.3f}", **FAR)),
            Column("gain kept", lambda line: mean_and_spread(gains(line), "{:.1f} %")),
            _of_row(facts),
            _of_row(accuracy(f"facts in {documents} passages", **passages)),
            Column("cache, MiB", lambda line: _mib(line.cache and line.cache.value)),
        ]
        if any("host_bytes" in line.cache.params for line in lines if line.cache):
            columns.append(Column("in host memory, MiB", _host_cache))
        return "\n".join(markdown(columns, lines)) + "\n"

    def _line(self, method: Method) -> Line:
        """Collect a method's measurements of every seed."""
        row: list[Record] = []
        gains = []
        ending = "_zero" if self.size.is_brief and not method.trains else ""
        ends = [f"{name}{ending}" for name in ("window", "full")]
        for seed in self.size.seeds:
            of_seed = self._of_stage(method.name, seed)
            row += of_seed
            window, full = (self._of_stage(name, seed) for name in ends)
            if of_seed and window and full and method.name not in ends:
                low, value, high = (newest(x, **FAR).value for x in (window, of_seed, full))
                gains.append(math.log(low / value) / math.log(low / high))
        return Line(method, row, gains, self._cache(method))

    def _of_stage(self, method: str, seed: int) -> list[Record]:
        """Return the records of a method's stage; empty where it was not run."""
        stage = self.stage(method, seed)
        return [
            record
            for record in self.records
            if record.params.get("stage") == stage and self._is_of_size(record)
        ]

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


def _of_row(column: Column) -> Column:
    """Return a column of a line's records."""
    return column._replace(cell=lambda line: column.cell(line.row))


def _seeds(line: Line) -> str:
    return ", ".join(map(str, dict.fromkeys(record.params["seed"] for record in line.row)))


def _mib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:.2f}"


def _host_cache(line: Line) -> str:
    return _mib(line.cache and line.cache.params.get("host_bytes", 0))
