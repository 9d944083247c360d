"""Write the first tables of docs/benchmarks.md: full attention beside the default and the paper's
rule, 128K tokens, one GPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
from corecontext.record import Record, latest

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


USER_QUANTITIES = (
    ("user.first_token_s", "Llama-3.1-8B, first token", lambda value: shown_ms(1e3 * value)),
    ("user.next_token_ms", "Llama-3.1-8B, next token", shown_ms),
    ("user.device_bytes", "Llama-3.1-8B, key-value cache on the GPU", shown_bytes),
    ("user.host_bytes", "Llama-3.1-8B, key-value cache in host memory", shown_bytes),
)
OWN_CHOICE = {"preset": "default", "fetch_share": 1, "choices": "model"}
"""Params of passes in which each query chooses, as in training; neighbours choose alike."""
ALONE = {"length": LENGTH, "weights": "bfloat16", "compiled": False}
AT_ONCE = {
    "prompt_length": 32_768,
    "requests": 192,
    "weights": "fp8",
    "compiled": True,
    "most_batched": 8192,
}
VLLM_QUANTITIES = (
    (
        "vllm.first_token_s",
        "Llama-3.1-8B in vLLM, first token",
        lambda value: shown_ms(1e3 * value),
        ALONE,
    ),
    ("vllm.next_token_ms", "Llama-3.1-8B in vLLM, next token", shown_ms, ALONE),
    (
        "vllm.requests_per_s",
        "Llama-3.1-8B in vLLM, requests of 32K a second",
        lambda value: f"{value:.3g}",
        AT_ONCE,
    ),
)


class Line(NamedTuple):
    """A row of the table; full attention and ours in the unit that `show` takes."""

    label: str
    full: float
    ours: float
    show: Callable[[float], str]
    kernel: str = ""
    """Computes full attention; "" where it makes no difference."""
    more_is_better: bool = False

    @property
    def shown_full(self) -> str:
        """Full attention's cell."""
        kernel = f" ({KERNEL_TITLES.get(self.kernel, self.kernel)})" if self.kernel else ""
        return self.show(self.full) + kernel

    @property
    def ratio(self) -> str:
        """How many times better ours is; "" of what full attention does not need."""
        if not self.full:
            return ""
        return shown_times(self.ours / self.full if self.more_is_better else self.full / self.ours)


def _columns(title: str) -> list[Column]:
    """Return the columns of a table, ours under a title."""
    return [
        Column(f"{shown_tokens(LENGTH)} tokens, one {DEVICE}", lambda line: line.label, left=True),
        Column("full attention", lambda line: line.shown_full),
        Column(title, lambda line: line.show(line.ours)),
        Column("ratio", lambda line: line.ratio),
    ]


def default_markdown(records: Sequence[Record]) -> str:
    """Return the table of the default; what it is compared with is the fastest that was measured
    in its place."""
    note = (
        "bfloat16, one sequence, random weights, fetch with raw tokens in host memory; a layer's "
        "passes are those of a training, with raw tokens on the GPU: each query chooses 64 groups, "
        "and neighbours choose alike. In vLLM full attention is its FlashAttention 3; requests of "
        "32K have 1,024 new tokens, 192 are sent at once, weights are in fp8 under torch.compile."
    )
    lines = [
        *_pass_lines(records),
        *_user_lines(records),
        *_vllm_lines(records),
    ]
    return "\n".join([*markdown(_columns("default"), lines), "", note]) + "\n"


def headline_markdown(records: Sequence[Record]) -> str:
    """Return the table of the paper's rule; full attention is the fastest that was measured."""
    comparison = _comparison(records)
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
    return "\n".join([*markdown(_columns("CCA"), lines), "", note]) + "\n"


def _pass_lines(records: Sequence[Record]) -> Iterator[Line]:
    """Yield the passes of a layer in which each query chooses."""
    for row in time_rows(records):
        if row.graph or not _is_headline(row):
            continue
        name = f"operator.{row.pass_name}_ms"
        sizes = {"length": LENGTH, "kv_heads": KV_HEADS, "batch": 1}
        ours = _newest(records, name, {**OWN_CHOICE, **sizes})
        if ours is not None:
            assert row.best is not None
            kernel, full = row.best
            yield Line(PASSES[row.pass_name], full, ours.value, shown_ms, kernel)


def _user_lines(records: Sequence[Record]) -> Iterator[Line]:
    """Yield what a user waits for, full attention in the run of the default."""
    place = {"model": TABLE_SHAPE, "length": LENGTH}
    for name, label, show in USER_QUANTITIES:
        ours = _newest(records, name, {**place, "method": "default"})
        assert ours is not None
        before = records[: records.index(ours)]
        full = _newest(before, name, {**place, "method": "full"})
        assert full is not None
        yield Line(label, full.value, ours.value, show)


def _vllm_lines(records: Sequence[Record]) -> Iterator[Line]:
    """Yield quantities of vLLM, both methods in one release."""
    for name, label, show, load in VLLM_QUANTITIES:
        ours = _newest(records, name, {**load, "method": "fetch", "store": "host"})
        assert ours is not None
        release = [r for r in records if r.versions.get("vllm") == ours.versions["vllm"]]
        full = _newest(release, name, {**load, "method": "full"})
        assert full is not None
        more_is_better = name == "vllm.requests_per_s"
        yield Line(label, full.value, ours.value, show, more_is_better=more_is_better)


def _newest(records: Sequence[Record], name: str, params: Mapping[str, Any]) -> Record | None:
    """Return the newest record of the table's device that has these params."""
    return latest((r for r in records if r.device == DEVICE), name, **params)


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
