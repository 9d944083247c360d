"""Declare the table of vLLM: a row for each quantity and load, methods beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
METHODS = {"full": "FlashAttention", "cca": "core context", "fetch": "fetch"}


def vllm_markdown(records: Sequence[Record]) -> str:
    """Return the table, and under it the device and vLLM's release.

    Methods that were sent other numbers of requests have a row each, without a gain, until both
    were sent one number.
    """
    rows = rows_by([Key("", _place)], records)
    compared = {(row[0].name, _load(row[0])) for row in rows if len(_methods(row)) > 1}
    rows = [
        row
        for row in rows
        if len(_methods(row)) > 1 or (row[0].name, _load(row[0])) not in compared
    ]
    columns = COLUMNS
    if any("fetch" in _methods(row) for row in rows):
        columns += (_method("fetch"),)
    newest = max(records, key=lambda record: record.date)
    text = f"{newest.device}, vLLM {newest.versions.get('vllm', 'unknown')}"
    return "\n".join([*markdown(columns, rows), "", f"{text}.", ""])


def _methods(row: Row) -> set[str]:
    return {record.params["method"] for record in row}


def _value(row: Row, method: str) -> float | None:
    record = latest(row, row[0].name, method=method)
    return None if record is None else record.value


def _method(method: str) -> Column:
    """Return the column of a method's newest values."""

    def cell(row: Row) -> str:
        value = _value(row, method)
        return "" if value is None else QUANTITIES[row[0].name].show(value)

    return Column(METHODS[method], cell)


def _gain(row: Row) -> str:
    """Show how many times better core context is."""
    full, cca = (_value(row, method) for method in ("full", "cca"))
    if full is None or cca is None:
        return ""
    return shown_times(cca / full if QUANTITIES[row[0].name].more_is_better else full / cca)


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
    elif "length" in p:
        load = f"{shown_tokens(p['length'])} alone"
    else:
        load = f"{shown_tokens(p['prompt_length'])} + {p['new_tokens']:,}"
    weights = p.get("weights", "bfloat16")  # older records do not name them
    if weights != "bfloat16":
        load += f", {weights} weights"
    return f"{load}, torch.compile" if p.get("compiled") else load


def _loads(row: Row) -> str:
    """Describe the requests of a row, and how many are sent at once."""
    p = row[0].params
    return _load(row[0]) + ("" if "length" in p else f", {p['requests']} at once")


COLUMNS = (
    Column("", lambda row: QUANTITIES[row[0].name].title, left=True),
    Column("load", _loads, left=True),
    *map(_method, ("full", "cca")),
    Column("gain", _gain),
)
