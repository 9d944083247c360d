"""Write the table of fetch's indices from the records of a pretrained model."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import Column, Key, Row, markdown, mean, rows_by
from corecontext.ops.fetch.index import index_of
from corecontext.record import Record
from reproduction.real.tables import most_windows, rows_of

HEAD_DIM = 64
"""Of SmolLM2-135M, whose keys have 16 bits."""
FETCHED = (512, 1024)
"""Raw tokens of the table's columns."""
MEAN = "{:.1f} %"


def _bytes_a_token(params: Mapping[str, Any]) -> float:
    """Return the bytes of an index by token and KV head."""
    name, dim = _name(params), HEAD_DIM
    if name.startswith(("learned:", "projected:")):
        _, rank, name = name.split(":", 2)
        dim = int(rank)
    return _bytes_of(name, params["group_size"], dim) / params["group_size"]


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
    groups with the largest masses, and gain kept. The store changes no choice."""
    rows = [row for row in rows_of(records, trained=False) if _is_compared(row[0].params)]
    indexed = [record for row in rows for record in row if _raw_tokens(record) in FETCHED]
    windows = most_windows(rows)
    columns = [
        Column("index", lambda row: f"`{_name(row[0].params)}`", left=True),
        Column("tokens of a group", lambda row: str(row[0].params["group_size"])),
        Column("bytes a token", lambda row: f"{_bytes_a_token(row[0].params):.1f}"),
    ]
    for count in FETCHED:
        columns.append(_shown("groups recalled", "real.recall", count))
        columns.append(_shown("gain kept", "real.gain_kept", count, windows))
    # Gains of fewer windows compare with each other alone.
    fewer = {(r.params["windows"], _raw_tokens(r)) for r in indexed if r.name == "real.gain_kept"}
    for number, count in sorted(fewer, key=lambda place: (str(place[0]), place[1])):
        if number < windows:
            columns.append(
                _shown("gain kept", "real.gain_kept", count, number, rest=", {} windows")
            )
    places = list(dict.fromkeys(map(_place, indexed)))
    by_index = Key("", lambda record: places.index(_place(record)))
    best = _shown("", "real.gain_kept", FETCHED[-1], windows)

    def order(row: Row) -> tuple[int, float]:
        return round(_bytes_a_token(row[0].params)), float(best.cell(row).removesuffix(" %") or 0)

    return "\n".join(markdown(columns, sorted(rows_by([by_index], indexed), key=order))) + "\n"


def _is_compared(params: Mapping[str, Any]) -> bool:
    return bool(
        params["method"] == "fetch" and params["core_mass"] and params["window_size"] == 512
    )


def _place(record: Record) -> tuple[str, int]:
    return _name(record.params), record.params["group_size"]


def _raw_tokens(record: Record) -> int:
    """Return the raw tokens that a query fetches."""
    return record.params["fetch_groups"] * record.params["group_size"]


def _shown(title: str, name: str, count: int, windows: int | None = None, rest: str = "") -> Column:
    """Return the column of a share with so many tokens fetched."""
    params = {} if windows is None else {"windows": windows}
    column = mean(f"{title}, {count:,} tokens{rest.format(windows)}", name, MEAN, 100, **params)

    def cell(row: Row) -> str:
        return column.cell([record for record in row if _raw_tokens(record) == count])

    return column._replace(cell=cell)


def _name(params: Mapping[str, Any]) -> str:
    """Return the name of an index, the shorter of two."""
    index, group_size = params["index"], params["group_size"]
    kind, *numbers = index.split(":")
    if kind == "parts" and len(numbers) == 2 and 2 * int(numbers[0]) == group_size:
        return f"pairs:{numbers[1]}"
    return index
