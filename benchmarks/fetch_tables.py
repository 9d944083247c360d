"""Declare the tables of fetch: passes of the operator, steps and whole models."""

from collections.abc import Sequence

from benchmarks.operator_report import LABELS
from benchmarks.tables import (
    Column,
    Key,
    Row,
    grouped,
    key,
    newest,
    shown_bytes,
    shown_ms,
    shown_us,
)
from corecontext.record import Record

OPERATORS = {
    "sdpa_cudnn": "full attention (cuDNN)",
    "cca": "CCA",
    "fetch": "`pairs:2`",
    "fetch_shared": "shared",
    "fetch_mean": "`mean`",
    "fetch_mean_shared": "shared",
}
STEPS = {"sdpa_cudnn": "full attention (cuDNN)", "cca": "CCA", "fetch": "fetch"}
MODELS = {
    "full_rows": "full attention (this package's decoding step)",
    "cca": "CCA",
    "fetch": "fetch, raw tokens on the device",
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


def fetch_markdown(records: Sequence[Record]) -> str:
    """Return the tables of the operator's passes, of its decoding step, and of whole models."""
    models = [r for r in records if r.name.startswith("model.") and r.params["method"] in MODELS]
    lines: list[str] = []
    for name in PASSES:
        timed = f"operator.{name}_ms"
        keys = (Key("", lambda _, name=name: LABELS[name], left=True), *SIZES)  # type: ignore[misc]
        columns = [newest(title, timed, shown_ms, method=m) for m, title in OPERATORS.items()]
        # Of passes those without a CUDA graph.
        passes = [r for r in records if r.name == timed and r.params.get("timer") != "graph"]
        lines += grouped(keys, columns, passes)[2 * bool(lines) :]
    step = "operator.decode_us"
    lines += ["", "One decoding step of one layer:", ""]
    columns = [newest(title, step, shown_us, method=method) for method, title in STEPS.items()]
    steps = [r for r in records if r.name == step]
    lines += grouped((*SIZES, key("batch", "batch")), columns, steps)
    lines += ["", "Llama-3.1-8B's shape, random weights:", ""]
    columns = [
        newest("first token", "model.first_token_s", "{:.2f} s".format),
        newest("next token", "model.next_token_ms", shown_ms),
        newest("cache on the device", "model.cache_bytes", shown_bytes),
        newest("in host memory", "model.host_bytes", shown_bytes),
    ]
    rates = [r for r in models if r.name == "model.tokens_per_s"]
    lines += grouped(PLACE, columns, [r for r in models if r not in rates])
    lines += ["", "Tokens per second of decoding, the best batch:", ""]
    columns = [
        Column("batch", lambda row: str(_best(row).params["batch"])),
        Column("tokens per second", lambda row: f"{_best(row).value:,.0f}"),
    ]
    lines += grouped(PLACE, columns, rates)
    return "\n".join(lines) + "\n"


def _best(row: Row) -> Record:
    """Return the newest record of the fastest batch."""
    by_batch = {r.params["batch"]: r for r in row}
    return max(by_batch.values(), key=lambda r: (r.value, r.params["batch"]))
