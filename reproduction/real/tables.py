"""Write the tables of a pretrained model from its records: one line a method and its sizes."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.tables import Column, Row, is_of, markdown, mean, shown_mib
from corecontext.config import PAPER_RULE
from corecontext.record import Record, latest
from reproduction.real.gains import ENDS, SAME, is_end, is_other_training
from reproduction.real.measured import MEASURED
from reproduction.real.methods import TITLES
from reproduction.real.training import Adaptation

APART = (*SAME, *MEASURED, "task", "position", "needles", "lists", "over", "of")
"""Params that do not make another line."""
OTHER_WORDING = "8fbfb92"
"""Commit whose needles were worded otherwise: its shares of right answers are in no table."""
SHORT = ("full", "cca", "duo_attention", "fetch", "fetch_equal_bytes")
"""Methods of the short table."""
NAMES = {
    "full": "full attention",
    "streaming_llm": "sinks and window",
    "streaming_llm_wide": "wider window",
    "cca": "CCA",
    "cca_raw_heads": "CCA, raw heads",
    "duo_attention": "DuoAttention",
    "fetch": "fetch",
    "fetch_equal_bytes": "fetch, the bytes of CCA",
    "fetch_raw_heads": "fetch, raw heads",
    "default": "default",
    "small": "small",
    "window_of_default": "wider window",
    "window_of_small": "wider window",
}
"""Names of methods in the short table and in the figure."""


FAR = {"name": "real.perplexity", "task": "far"}


def real_markdown(records: Sequence[Record], *, trained: bool, short: bool = False) -> str:
    """Return the table of models as they are, or of trained ones; means over the seeds. Indices
    without answers have a table of their own.

    Args:
        short: Only SHORT, with mass; of fetch that at equal bytes where there is any, or else the
            stores on the host where there are any.
    """
    rows = rows_of(records, trained=trained)
    rows = [row for row in rows if sizes_of(row)["method"] != "fetch" or tasks_of([row])]
    # Results do not depend on the store: with both measured, the host's bytes say more.
    sizes = [sizes_of(row) for row in rows]
    rows = [
        row
        for row, params in zip(rows, sizes)
        if params["store"] == "host" or {**params, "store": "host"} not in sizes
    ]
    if short:
        rows = _short(rows)
    named = Column("attention", _title, left=True)
    if short:
        named = Column("SmolLM2-135M-Instruct as it is, 8,192 tokens", name_of, left=True)
    columns = [named, _far(rows), _gain(rows)]
    columns[1:1] = [_cache("cache, MiB", "device_bytes", rows)]
    if any(_far_of(row, rows).params.get("host_bytes") for row in rows):
        columns.insert(2, _cache("on the host, MiB", "host_bytes", rows))
    return _table(columns, rows)


def _short(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the short table."""
    on_host = any(sizes_of(row)["store"] == "host" for row in rows)
    equal = [row for row in rows if sizes_of(row)["method"] == "fetch_equal_bytes"]
    # Of the settings at equal bytes the best.
    best = min(equal, key=lambda row: _far_of(row, rows).value, default=None)

    def is_shown(row: Row) -> bool:
        p = sizes_of(row)
        if p["method"] not in SHORT or p["core_mass"] is False:
            return False
        if on_host and p["store"] == "device":
            return False
        return row is best if equal and p["method"].startswith("fetch") else True

    return [row for row in rows if is_shown(row)]


def extended_markdown(records: Sequence[Record]) -> str:
    """Return the table of models trained on windows beyond their own, with a new rotary base."""
    rows = rows_of(records, trained=True, extended=True)
    columns = [
        Column("attention", _title, left=True),
        MILLIONS,
        mean("training, s", "real.training_s", "{:.0f}"),
        mean("training, GiB", "real.training_bytes", "{:.1f}", 2**-30),
        _cache("cache, MiB", "device_bytes", rows),
    ]
    positions = {r.params["position"] for row in rows for r in row if "position" in r.params}
    for place in sorted(positions):
        columns.append(mean(f"perplexity, {place}", "real.perplexity", "{:.2f}", position=place))
    return _table(columns, rows, seeds=False)


def tries_markdown(records: Sequence[Record]) -> str:
    """Return the table of other trainings than the protocol's, and of shorter ones."""
    rows = rows_of(records, trained=True, tries=True)
    named = [Column("attention", _title, left=True), Column("training", _training, left=True)]
    return _table([*named, MILLIONS, _far(rows), _gain(rows)], rows, at=2)


def _millions(row: Row) -> str:
    """Return the tokens of a training."""
    return f"{row[0].params['trained_tokens'] / 1e6:.1f}"


MILLIONS = Column("tokens, millions", _millions)


def _training(row: Row) -> str:
    """Return in words how a training differs from the protocol's."""
    p = row[0].params
    parts = []
    if p.get("layer_steps"):
        parts.append(f"each layer by itself in the first {p['layer_steps']} steps")
    if "distil" in p:
        parts.append(f"{p['distil']:.0%} of the loss divergence")
    if p.get("strategy") == "partial":
        parts.append("queries, keys and values alone")
    if p.get("strategy") == "lora":
        parts.append(f"LoRA of rank {p['lora_rank']}")
    if "head_needles" in p:
        parts.append(f"heads by {p['head_needles']} needles")
    if "train_text" in p:
        parts.append(f"on {p['train_text']}")
    if p["learning_rate"] != Adaptation.learning_rate:
        parts.append(f"rate {p['learning_rate']:g}")
    return ", ".join(parts) or "the protocol's"


def protocol_tokens(records: Sequence[Record]) -> int:
    """Return the tokens of the protocol's training: the most of any, but longer windows'."""
    of_protocol = [r.params["trained_tokens"] for r in records if not r.params.get("rope_theta")]
    return max(of_protocol, default=0)


def rows_of(
    records: Sequence[Record], *, trained: bool, extended: bool = False, tries: bool = False
) -> list[Row]:
    """Collect the records of each method and size, in the order of METHODS.

    Args:
        extended: Trained on windows beyond the model's own.
        tries: Other or shorter trainings than the protocol's.
    """
    most = protocol_tokens(records)

    def counts(record: Record) -> bool:
        p = record.params
        if bool(p["trained_tokens"]) != trained or (p.get("rope_theta") is not None) != extended:
            return False
        if record.name == "real.accuracy" and (record.commit or "").startswith(OTHER_WORDING):
            return False
        is_try = is_other_training(p) or p["trained_tokens"] < most
        return not trained or extended or is_try == tries

    apart = [name for name in APART if name != "trained_tokens" or not (tries or extended)]
    rows: dict[str, list[Record]] = {}
    for record in filter(counts, records):
        rows.setdefault(repr(sorted(sizes_of([record], apart).items())), []).append(record)
    windows = most_windows(rows.values())
    measured = [
        row
        for row in rows.values()
        if any(is_of(r, **FAR, windows=windows) or r.name == "real.recall" for r in row)
    ]
    return sorted(measured, key=lambda row: list(TITLES).index(row[0].params["method"]))


def sizes_of(row: Row, apart: Sequence[str] = APART) -> dict[str, Any]:
    """Return the params that the records of a row share."""
    return {name: value for name, value in row[0].params.items() if name not in apart}


def most_windows(rows: Iterable[Row]) -> int:
    """Return the most windows of a record: gains and perplexities of fewer compare with each other
    alone."""
    return max((r.params.get("windows", 0) for row in rows for r in row), default=0)


def _table(columns: list[Column], rows: Sequence[Row], at: int = 1, seeds: bool = True) -> str:
    """Return a table, with a column of seeds where there are several, and at its end one for each
    task."""
    if seeds and any(len(_seeds(row)) > 1 for row in rows):
        columns.insert(at, Column("seeds", lambda row: str(len(_seeds(row)))))
    for task, length in sorted(tasks_of(rows), key=lambda task: (task[0] == "list", task[1])):
        place = {"task": task, "length": length}
        title = f"{task}, {length:,} tokens"
        columns.append(mean(title, "real.accuracy", "{:.0f} %", 100, **place))
    return "\n".join(markdown(columns, rows)) + "\n"


def tasks_of(rows: Sequence[Row]) -> set[tuple[str, int]]:
    """Return the tasks with answers, and the tokens of their prompts."""
    answers = (r.params for row in rows for r in row if r.name == "real.accuracy")
    return {(p["task"], p["length"]) for p in answers}


def name_of(row: Row) -> str:
    """Return a method's short name."""
    p = row[0].params
    text = NAMES[p["method"]]
    if p["core_mass"] and p["fetch_groups"] is None:
        text += " with mass"
    if p["fetch_groups"] is not None:
        text += f", {p['fetch_groups']} groups"
        if p["group_size"] != PAPER_RULE["group_size"]:
            text += f" of {p['group_size']}"
    if p["index"] not in (None, PAPER_RULE["fetch_index"]):
        text += f" by {p['index']}"
    if p["store"] == "host":
        text += ", raw tokens on the host"
    return text


def _title(row: Row) -> str:
    """Return a method in words, with the sizes that it has."""
    p = row[0].params
    text = TITLES[p["method"]]
    if p["core_mass"]:
        text += " with mass"
    sizes = []
    for letter, name in (("g", "group_size"), ("s", "window_size"), ("sinks", "sink_size")):
        if p[name] is not None:
            sizes.append(f"{letter} = {p[name]}")
    if p["raw_heads"] is not None:
        sizes.append(f"{p['raw_heads']} raw heads")
    if p["fetch_groups"] is not None:
        sizes.append(f"{p['fetch_groups']} groups by {p['index']}")
    if p["store"] == "host":
        sizes.append("raw tokens on the host")
    return f"{text}: {', '.join(sizes)}" if sizes else text


def _seeds(row: Row) -> set[int]:
    return {r.params["seed"] for r in row if is_of(r, **FAR)}


def _far_of(row: Row, rows: Sequence[Row]) -> Record:
    """Return the newest far perplexity of a row."""
    record = latest(row, **FAR, windows=most_windows(rows))
    assert record is not None
    return record


def _cache(title: str, size: str, rows: Sequence[Row]) -> Column:
    """Return the column of bytes of the cache after a window."""

    def cell(row: Row) -> str:
        value = _far_of(row, rows).params[size]
        return "" if value is None else shown_mib(value).removesuffix(" MiB")

    return Column(title, cell)


def _far(rows: Sequence[Row]) -> Column:
    return mean("perplexity, far", form="{:.3f}", **FAR, windows=most_windows(rows))


def _gain(rows: Sequence[Row]) -> Column:
    """Return the column of gains kept, the ends by definition."""
    windows = most_windows(rows)
    kept = mean("gain kept", "real.gain_kept", "{:.1f} %", 100, windows=windows)

    def cell(row: Row) -> str:
        p = row[0].params
        return ENDS[p["method"]] if is_end(p) else kept.cell(row)

    return kept._replace(cell=cell)
