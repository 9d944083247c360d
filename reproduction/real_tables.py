"""Write the tables of a pretrained model from its records: one line a method and its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any, NamedTuple

from benchmarks.tables import Column, markdown, shown_mib
from corecontext.record import Record
from reproduction.real_gains import ENDS, MEASURED, SAME
from reproduction.real_methods import METHODS, TITLES

APART = (*SAME, *MEASURED, "task", "needles", "lists", "over", "of")
"""Params that do not make another line."""


class Line(NamedTuple):
    """A method with its sizes, and its newest values by measure and seed."""

    params: dict[str, Any]
    values: dict[str, dict[int, float]]
    """By "far", "gain" or the tokens of a needle's prompt; then by seed."""
    cache: dict[str, Any]
    """device_bytes and host_bytes after a window."""


def real_markdown(records: Sequence[Record], *, trained: bool) -> str:
    """Return the table of models as they are, or of trained ones; means over the seeds."""
    lines = _lines(
        [record for record in records if bool(record.params["trained_tokens"]) == trained]
    )
    lengths = {name for line in lines for name in line.values if name.isdigit()}
    columns = [
        Column("attention", _title, left=True),
        Column("cache, MiB", lambda line: _cache(line, "device_bytes")),
        Column("perplexity, far", lambda line: _mean(line, "far", "{:.3f}", 1)),
        Column("gain kept", lambda line: _mean(line, "gain", "{:.1f} %", 100)),
    ]
    if any(line.cache.get("host_bytes") for line in lines):
        columns.insert(2, Column("on the host, MiB", lambda line: _cache(line, "host_bytes")))
    for length in sorted(lengths, key=int):
        found = partial(_mean, name=length, form="{:.0f} %", scale=100)
        columns.append(Column(f"needles, {int(length):,} tokens", found))
    if any(len(line.values["far"]) > 1 for line in lines):
        columns.insert(1, Column("seeds", lambda line: str(len(line.values["far"]))))
    return "\n".join(markdown(columns, lines)) + "\n"


def _lines(records: Sequence[Record]) -> list[Line]:
    """Collect the newest values of each method and size, in the order of METHODS."""
    lines: dict[str, Line] = {}
    for record in records:
        params = {name: value for name, value in record.params.items() if name not in APART}
        line = lines.setdefault(repr(sorted(params.items())), Line(params, {}, {}))
        name = str(record.params["length"])
        if record.name == "real.perplexity":
            name = "far"
            line.cache.update({size: record.params[size] for size in MEASURED})
        elif record.name == "real.gain_kept":
            name = "gain"
        line.values.setdefault(name, {})[record.params["seed"]] = record.value
    measured = [line for line in lines.values() if "far" in line.values]
    return sorted(measured, key=lambda line: list(METHODS).index(line.params["method"]))


def _title(line: Line) -> str:
    """Return a method in words, with the sizes that it has."""
    p = line.params
    text = TITLES[p["method"]]
    if p["core_mass"]:
        text += " with mass"
    sizes = []
    for letter, name in (("g", "group_size"), ("s", "window_size"), ("sinks", "sink_size")):
        if p[name] is not None:
            sizes.append(f"{letter} = {p[name]}")
    if p["raw_heads"] is not None:
        sizes.append(f"{p['raw_heads']} raw heads")
    if p["fetch_groups"] is not None:
        sizes.append(f"{p['fetch_groups']} groups by {p['index']}")
    return f"{text}: {', '.join(sizes)}" if sizes else text


def _cache(line: Line, name: str) -> str:
    value = line.cache[name]
    return "" if value is None else shown_mib(value).removesuffix(" MiB")


def _mean(line: Line, name: str, form: str, scale: float) -> str:
    """Show a mean over seeds, and from two on their spread; the ends of the gain by definition."""
    values = [scale * value for value in line.values.get(name, {}).values()]
    if not values:
        return ENDS.get(line.params["method"], "") if name == "gain" else ""
    spread = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return form.format(fmean(values)) + spread
