"""Declare the table of vLLM: a row for each quantity and load, methods beside each other."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.tables import (
    Column,
    Key,
    Row,
    markdown,
    rows_by,
    shown_ms,
    shown_times,
    shown_tokens,
)
from corecontext.record import Record, latest


class Quantity(NamedTuple):
    """Say how a quantity is shown."""

    title: str
    show: Callable[[float], str]
    more_is_better: bool


QUANTITIES = {
    "vllm.first_token_s": Quantity("first token", lambda s: shown_ms(1000 * s), False),
    "vllm.next_token_ms": Quantity("next token", shown_ms, False),
    "vllm.requests_per_s": Quantity("requests per second", lambda x: f"{x:.3g}", True),
    "vllm.cache_tokens": Quantity("tokens in the cache", lambda x: f"{x:,.0f}", True),
}
METHODS = {
    "full": "FlashAttention",
    "cca": "core context",
    "fetch": "fetch",
    "host": "fetch, host memory",
}


def vllm_markdown(records: Sequence[Record]) -> str:
    """Return a table for each device and release of vLLM, the newest first, which are under it.

    Methods that were sent other numbers of requests have a row each, without a gain, until both
    were sent one number.
    """
    runs: dict[str, list[Record]] = {}
    records = [record for record in records if record.name in QUANTITIES]
    for record in sorted(records, key=lambda record: record.date, reverse=True):
        release = record.versions.get("vllm", "unknown")
        runs.setdefault(f"{record.device}, vLLM {release}", []).append(record)
    return "\n".join(_table(run, where) for where, run in runs.items())


def _table(records: Sequence[Record], where: str) -> str:
    """Return the table of one device and release."""
    rows = rows_by([Key("", _place)], records)
    compared = {(row[0].name, _load(row[0])) for row in rows if len(_methods(row)) > 1}
    rows = [
        row
        for row in rows
        if len(_methods(row)) > 1 or (row[0].name, _load(row[0])) not in compared
    ]
    measured = set().union(*map(_methods, rows))
    columns = [*COLUMNS, _method("full")]
    for method in ("cca", "fetch", "host"):
        if method in measured:
            columns += [_method(method), Column("gain", partial(_gain, method))]
    return "\n".join([*markdown(columns, rows), "", f"{where}.", ""])


def _methods(row: Row) -> set[str]:
    return set(map(_method_of, row))


def _method_of(record: Record) -> str:
    """Return a record's method; fetch from host memory has a column of its own."""
    return "host" if record.params.get("store") == "host" else record.params["method"]


def _value(row: Row, method: str) -> float | None:
    record = latest([x for x in row if _method_of(x) == method], row[0].name)
    return None if record is None else record.value


def _method(method: str) -> Column:
    """Return the column of a method's newest values."""

    def cell(row: Row) -> str:
        value = _value(row, method)
        return "" if value is None else QUANTITIES[row[0].name].show(value)

    return Column(METHODS[method], cell)


def _gain(method: str, row: Row) -> str:
    """Show how many times better a method is."""
    full, own = (_value(row, name) for name in ("full", method))
    if full is None or own is None:
        return ""
    return shown_times(own / full if QUANTITIES[row[0].name].more_is_better else full / own)


def _place(record: Record) -> tuple[Any, ...]:
    """Return the place of a record's row: by quantity, weights and compilation, then one request
    alone before several, short ones first."""
    p = record.params
    return (
        list(QUANTITIES).index(record.name),
        p.get("weights", "bfloat16") != "bfloat16",
        bool(p.get("compiled")),
        "length" not in p,
        p.get("length") or p["prompt_length"],
        p.get("requests", 0),
        _load(record),
    )


def _load(record: Record) -> str:
    """Describe each request of a record."""
    p = record.params
    if record.name == "vllm.cache_tokens":
        load = f"requests of {p['length']:,} tokens"
        if p.get("memory_share", 0.9) != 0.9:
            load += f", {p['memory_share']:.0%} of the memory"
        load += _steps(p)
    elif "length" in p:
        load = f"{shown_tokens(p['length'])} alone"
    else:
        load = f"{shown_tokens(p['prompt_length'])} + {p['new_tokens']:,}"
        load += _steps(p)
    weights = p.get("weights", "bfloat16")  # older records do not name them
    if weights != "bfloat16":
        load += f", {weights} weights"
    return f"{load}, torch.compile" if p.get("compiled") else load


def _steps(params: Mapping[str, Any]) -> str:
    """Describe the most tokens of a step, where they are not vLLM's own number on most GPUs."""
    most = params.get("most_batched", 8192)
    return "" if most == 8192 else f" in steps of {most:,}"


def _loads(row: Row) -> str:
    """Describe the requests of a row, and how many are sent at once."""
    p = row[0].params
    return _load(row[0]) + ("" if "length" in p else f", {p['requests']} at once")


COLUMNS = (
    Column("", lambda row: QUANTITIES[row[0].name].title, left=True),
    Column("load", _loads, left=True),
)
