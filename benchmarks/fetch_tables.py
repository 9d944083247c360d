"""Declare the tables of fetch: passes of the operator, steps and whole models."""

from collections.abc import Sequence
from typing import Any

from benchmarks.operator_report import LABELS
from benchmarks.tables import (
    Column,
    Key,
    Row,
    grouped,
    key,
    newest,
    shown_ms,
    shown_us,
)
from corecontext.record import Record

PASS_COLUMNS: dict[str, dict[str, Any]] = {
    "full attention (cuDNN)": {"method": "sdpa_cudnn"},
    "each query": {"preset": "default", "fetch_share": 1, "choices": "model"},
    "shared by 16": {"preset": "default", "fetch_share": 16, "choices": "model"},
    "each query, random": {"preset": "default", "fetch_share": 1, "choices": "random"},
    "shared by 16, random": {"preset": "default", "fetch_share": 16, "choices": "random"},
}
"""Params of a pass, by the titles of its columns."""
STEPS = {"sdpa_cudnn": "full attention (cuDNN)", "cca": "CCA", "fetch": "fetch"}
MODELS = {
    "full_rows": "full attention (this package's decoding step)",
    "fetch_host": "fetch, raw tokens in host memory",
}
PASSES = ("forward", "forward_backward")
SIZES = (key("kv_heads", "KV heads"), key("length", "tokens", "{:,}".format))
PLACE = (
    Key(
        "",
        lambda record: list(MODELS).index(record.params["method"]),
        lambda number: list(MODELS.values())[number],
        left=True,
    ),
    key("length", "tokens", "{:,}".format),
    Key("slots", lambda record: record.params.get("fetch_slots") or 0, lambda n: str(n or "")),
)
"""A whole model's method, length and slots."""


def passes_markdown(records: Sequence[Record]) -> str:
    """Return the tables of the operator's passes under the preset `default`."""
    lines: list[str] = []
    for name in PASSES:
        timed = [r for r in records if r.name == f"operator.{name}_ms"]
        keys = (Key("", lambda _, name=name: LABELS[name], left=True), *SIZES)  # type: ignore[misc]
        columns = [
            newest(title, f"operator.{name}_ms", shown_ms, **params)
            for title, params in PASS_COLUMNS.items()
        ]
        # Others of the same device, KV heads and length, and like these without a CUDA graph.
        places = {_place(r) for r in timed if r.params.get("preset") == "default"}
        lines += grouped(keys, columns, [r for r in timed if _place(r) in places])[
            2 * bool(lines) :
        ]
    return "\n".join(lines) + "\n"


def fetch_markdown(records: Sequence[Record]) -> str:
    """Return the tables of the operator's decoding step, and of whole models in batches."""
    step = "operator.decode_us"
    lines = ["One decoding step of one layer:", ""]
    columns = [newest(title, step, shown_us, method=method) for method, title in STEPS.items()]
    steps = [r for r in records if r.name == step]
    lines += grouped((*SIZES, key("batch", "batch")), columns, steps)
    rates = [r for r in records if r.name == "model.tokens_per_s" and r.params["method"] in MODELS]
    lines += ["", "Tokens per second of decoding, the best batch:", ""]
    columns = [
        Column("batch", lambda row: str(_best(row).params["batch"])),
        Column("tokens per second", lambda row: f"{_best(row).value:,.0f}"),
    ]
    lines += grouped(PLACE, columns, rates)
    return "\n".join(lines) + "\n"


def _place(record: Record) -> tuple[Any, ...]:
    """Return what the passes of a row share: device, KV heads, tokens and timer."""
    p = record.params
    return record.device, p["kv_heads"], p["length"], p.get("timer")


def _best(row: Row) -> Record:
    """Return the newest record of the fastest batch."""
    by_batch = {r.params["batch"]: r for r in row}
    return max(by_batch.values(), key=lambda r: (r.value, r.params["batch"]))
