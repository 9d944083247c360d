"""Write the table of fetch's indices from the records of a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

from benchmarks.tables import Column, markdown
from corecontext.ops.fetch.index import index_of
from corecontext.record import Record
from reproduction.real_tables import Line, lines_of

HEAD_DIM = 64
"""Of SmolLM2-135M, whose keys have 16 bits."""
FETCHED = (512, 1024)
"""Raw tokens of the table's columns."""


class Indexed(NamedTuple):
    """An index with groups of one size, and its lines by the raw tokens fetched."""

    index: str
    group_size: int
    lines: dict[int, Line]

    @property
    def bytes_a_token(self) -> float:
        """Bytes of the index by token and KV head."""
        name, dim = self.index, HEAD_DIM
        if name.startswith(("learned:", "projected:")):
            _, rank, name = name.split(":", 2)
            dim = int(rank)
        return _bytes_of(name, self.group_size, dim) / self.group_size

    def values_of(self, count: int) -> dict[str, dict[int, float]]:
        """Return the values with so many raw tokens fetched, as a line has them."""
        return self.lines[count].values if count in self.lines else {}


def _bytes_of(name: str, group_size: int, dim: int) -> int:
    """Return the bytes of a group in an index; records have indices that are gone, too."""
    kind, *numbers = name.split(":")
    if kind in ("core", "bounds"):
        return {"core": 0, "bounds": 2}[kind] * 2 * dim
    if kind == "segments":
        name = f"parts:{numbers[0]}:{numbers[1]}"
    if kind == "parts" and len(numbers) == 1:
        return int(numbers[0]) * 2 * dim
    return index_of(name).num_bytes(group_size, dim, 2)


def index_markdown(records: Sequence[Record]) -> str:
    """Return the table of indices on the model as it is, by their bytes and gain: recall of the
    groups with the largest masses, and gain kept."""
    rows: dict[tuple[str, int], Indexed] = {}
    for line in lines_of(records, trained=False):
        p = line.params
        if p["method"] != "fetch" or not p["core_mass"] or p["window_size"] != 512:
            continue
        key = (_name(p["index"], p["group_size"]), p["group_size"])
        row = rows.setdefault(key, Indexed(*key, {}))
        of_tokens = row.lines.setdefault(p["fetch_groups"] * p["group_size"], line)
        # The store changes no choice.
        for name, values in line.values.items():
            of_tokens.values.setdefault(name, {}).update(values)
    shown = [row for row in rows.values() if any(count in row.lines for count in FETCHED)]
    shown.sort(key=lambda row: (round(row.bytes_a_token), _value(row, "gain", FETCHED[-1]) or 0))
    columns = [
        Column("index", lambda row: f"`{row.index}`", left=True),
        Column("tokens of a group", lambda row: str(row.group_size)),
        Column("bytes a token", lambda row: f"{row.bytes_a_token:.1f}"),
    ]
    for count in FETCHED:
        for title, name in (("groups recalled", "real.recall"), ("gain kept", "gain")):
            columns.append(
                Column(f"{title}, {count:,} tokens", partial(_shown, name=name, count=count))
            )
    # Gains of fewer windows compare with each other alone.
    names = {(name, count) for row in shown for count in FETCHED for name in row.values_of(count)}
    for name, count in sorted(names):
        if name.startswith("gain:"):
            title = f"gain kept, {count:,} tokens, {name.removeprefix('gain:')} windows"
            columns.append(Column(title, partial(_shown, name=name, count=count)))
    return "\n".join(markdown(columns, shown)) + "\n"


def _name(index: str, group_size: int) -> str:
    """Return the name of an index, the shorter of two."""
    kind, *numbers = index.split(":")
    if kind == "parts" and len(numbers) == 2 and 2 * int(numbers[0]) == group_size:
        return f"pairs:{numbers[1]}"
    return index


def _value(row: Indexed, name: str, count: int) -> float | None:
    """Return a value in percent, the mean over seeds."""
    values = row.values_of(count).get(name)
    return 100 * fmean(values.values()) if values else None


def _shown(row: Indexed, name: str, count: int) -> str:
    value = _value(row, name, count)
    return "" if value is None else f"{value:.1f} %"
