"""Write the first table of docs/benchmarks.md: CCA and full attention, 128K tokens, one GPU."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.model_report import Comparison, comparisons, main_comparisons
from benchmarks.operator_report import KERNEL_TITLES, Row, decode_rows, time_rows
from benchmarks.tables import (
    Column,
    markdown,
    shown_bytes,
    shown_ms,
    shown_times,
    shown_tokens,
    shown_us,
)
from corecontext.record import Record

DEVICE = "NVIDIA H200"
LENGTH = 131_072
KV_HEADS = 8  # as the model of the table has them
TABLE_SHAPE = "llama3.1-8b"
PASSES = {
    "forward": "attention of a layer, forward",
    "forward_backward": "attention of a layer, forward + backward",
    "decode": "attention of a layer, a decoding step",
}
QUANTITIES = (
    ("model.first_token_s", "Llama-3.1-8B, first token", lambda value: shown_ms(1e3 * value)),
    ("model.next_token_ms", "Llama-3.1-8B, next token", shown_ms),
    ("model.cache_bytes", "Llama-3.1-8B, key-value cache", shown_bytes),
)


class Line(NamedTuple):
    """A row of the table; full attention and CCA in the unit that `show` takes."""

    label: str
    full: float
    cca: float
    show: Callable[[float], str]
    kernel: str = ""
    """Computes full attention; "" where it makes no difference."""

    @property
    def shown_full(self) -> str:
        """Full attention's cell."""
        kernel = f" ({KERNEL_TITLES.get(self.kernel, self.kernel)})" if self.kernel else ""
        return self.show(self.full) + kernel


def headline_markdown(records: Sequence[Record]) -> str:
    """Return the table; full attention is the fastest that was measured."""
    comparison = _comparison(records)
    columns = [
        Column(f"{shown_tokens(LENGTH)} tokens, one {DEVICE}", lambda line: line.label, left=True),
        Column("full attention", lambda line: line.shown_full),
        Column("CCA", lambda line: line.show(line.cca)),
        Column("ratio", lambda line: shown_times(line.full / line.cca)),
    ]
    least = shown_ms(comparison.floors["model.next_token_ms", "full"])
    note = (
        f"{comparison.params['dtype']}, g = {comparison.params['group_size']}, s = "
        f"{comparison.params['window_size']}, one sequence, random weights. CCA by the paper's "
        "rule, without masses. Full attention is the fastest that was measured, by the kernel in "
        "brackets.\n"
        f"Lower bound for full attention's next token: {least} (weights and cache read once at "
        "peak bandwidth)."
    )
    lines = [*_operator_lines(records), *_model_lines(comparison)]
    return "\n".join([*markdown(columns, lines), "", note]) + "\n"


def _operator_lines(records: Sequence[Record]) -> Iterator[Line]:
    rows = [row for row in time_rows(records) if not row.graph] + decode_rows(records)
    for row in rows:
        if _is_headline(row) and row.pass_name in PASSES:
            assert row.best is not None
            kernel, full = row.best
            show = shown_us if row.pass_name == "decode" else shown_ms
            yield Line(PASSES[row.pass_name], full, row.cca, show, kernel)


def _is_headline(row: Row) -> bool:
    sizes = (row.length, row.params["kv_heads"], row.params["batch"])
    return row.device == DEVICE and sizes == (LENGTH, KV_HEADS, 1)


def _comparison(records: Sequence[Record]) -> Comparison:
    """Return the values of the table's model."""
    return next(
        comparison
        for comparison in main_comparisons(comparisons(records))
        if (comparison.device, comparison.params["shape"], comparison.length)
        == (DEVICE, TABLE_SHAPE, LENGTH)
    )


def _model_lines(comparison: Comparison) -> Iterator[Line]:
    for name, label, show in QUANTITIES:
        full = comparison.best_full(name)
        cca = comparison.value(name, "CCA")
        assert full is not None and cca is not None
        kernel = full[0].removeprefix("full (").replace(")", "")
        if name == "model.cache_bytes":
            kernel = ""
        elif kernel.startswith("rows"):
            kernel = "this package's decoding step"
        elif name == "model.next_token_ms":
            kernel += ", transformers' cache"
        yield Line(label, full[1], cca, show, kernel)
