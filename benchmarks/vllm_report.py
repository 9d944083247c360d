"""Show the records of the benchmark of vLLM, on the terminal and as a table of the docs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.tables import Column, markdown, print_table, shown_ms, shown_times, shown_tokens
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
    """Return a row for each quantity and load, from the newest records."""
    values: dict[tuple[str, str], dict[str, float]] = {}
    for record in sorted(records, key=lambda record: record.date):
        key = (record.name, _load(record))
        values.setdefault(key, {})[record.params["method"]] = record.value
    rows = [
        Row(name, load, methods.get("full"), methods.get("cca"))
        for (name, load), methods in values.items()
    ]
    return sorted(rows, key=lambda row: list(QUANTITIES).index(row.name))


def _load(record: Record) -> str:
    """Describe the requests of a record; their number may differ between the methods."""
    params = record.params
    if record.name == "vllm.cache_tokens":
        load = f"requests of {params['length']:,} tokens"
    elif "length" in params:
        load = f"{shown_tokens(params['length'])} alone"
    else:
        load = f"{shown_tokens(params['prompt_length'])} + {params['new_tokens']:,} at once"
    return load + _weights(record, ", {} weights")


def _weights(record: Record, text: str) -> str:
    """Name a record's weights by a text, empty for bfloat16; older records do not name them."""
    weights = record.params.get("weights", "bfloat16")
    return "" if weights == "bfloat16" else text.format(weights)


def vllm_markdown(records: Sequence[Record]) -> str:
    """Return the table, and the loads and settings under it."""
    lines = markdown(COLUMNS, rows_of(records))
    newest = max(records, key=lambda record: record.date)
    sent = {
        record.params["method"] + _weights(record, " with {} weights"): record.params["requests"]
        for record in sorted(records, key=lambda record: record.date)
        if "requests" in record.params
    }
    text = f"{newest.device}, vLLM {newest.versions.get('vllm', 'unknown')}"
    if sent:
        counts = ", ".join(f"{count} for {method}" for method, count in sorted(sent.items()))
        text += f"; requests at once: {counts}"
    return "\n".join([*lines, "", f"{text}.", ""])


def print_vllm(records: Sequence[Record]) -> None:
    """Print the table on the terminal."""
    print_table(COLUMNS, rows_of(records))
