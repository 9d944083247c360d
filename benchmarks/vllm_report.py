"""Write the table of vLLM from its records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.tables import Column, markdown, shown_ms, shown_times, shown_tokens
from corecontext.record import Record


class Row(NamedTuple):
    """Hold what both methods measured under one load."""

    name: str
    load: str
    full: float | None
    cca: float | None

    def show(self, value: float | None) -> str:
        """Return a value in its unit."""
        if value is None:
            return ""
        return QUANTITIES[self.name].show(value)

    @property
    def gain(self) -> str:
        """How many times better core context is."""
        if self.full is None or self.cca is None:
            return ""
        more = self.cca / self.full
        return shown_times(more if QUANTITIES[self.name].more_is_better else 1 / more)


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
COLUMNS = (
    Column("", lambda row: QUANTITIES[row.name].title, left=True),
    Column("load", lambda row: row.load, left=True),
    Column("FlashAttention", lambda row: row.show(row.full)),
    Column("core context", lambda row: row.show(row.cca)),
    Column("gain", lambda row: row.gain),
)


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Return a row for each quantity and load, from the newest records.

    Methods that were sent other numbers of requests have a row each, without a gain, until both
    were sent one number.
    """
    values: dict[tuple[str, str, str], dict[str, float]] = {}
    for record in sorted(records, key=lambda record: (_order(record), record.date)):
        key = (record.name, *_load(record))
        values.setdefault(key, {})[record.params["method"]] = record.value
    compared = {
        (name, of_each) for (name, of_each, _), methods in values.items() if len(methods) > 1
    }
    return [
        Row(name, of_each + at_once, methods.get("full"), methods.get("cca"))
        for (name, of_each, at_once), methods in values.items()
        if len(methods) > 1 or (name, of_each) not in compared
    ]


def _order(record: Record) -> tuple[int, ...]:
    """Return the place of a record's row: by quantity, weights and compilation, then one request
    alone before several, short ones first."""
    params = record.params
    length = params.get("length") or params["prompt_length"]
    return (
        list(QUANTITIES).index(record.name),
        params.get("weights", "bfloat16") != "bfloat16",
        bool(params.get("compiled")),
        "length" not in params,
        length,
        params.get("requests", 0),
    )


def _load(record: Record) -> tuple[str, str]:
    """Describe the requests of a record: each of them, and how many are sent at once."""
    params = record.params
    at_once = ""
    if record.name == "vllm.cache_tokens":
        load = f"requests of {params['length']:,} tokens"
    elif "length" in params:
        load = f"{shown_tokens(params['length'])} alone"
    else:
        load = f"{shown_tokens(params['prompt_length'])} + {params['new_tokens']:,}"
        at_once = f", {params['requests']} at once"
    weights = params.get("weights", "bfloat16")  # older records do not name them
    if weights != "bfloat16":
        load += f", {weights} weights"
    if params.get("compiled"):
        load += ", torch.compile"
    return load, at_once


def vllm_markdown(records: Sequence[Record]) -> str:
    """Return the table, and under it the device and vLLM's release."""
    lines = markdown(COLUMNS, rows_of(records))
    newest = max(records, key=lambda record: record.date)
    text = f"{newest.device}, vLLM {newest.versions.get('vllm', 'unknown')}"
    return "\n".join([*lines, "", f"{text}.", ""])
