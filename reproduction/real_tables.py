"""Write the tables of a pretrained model from its records: one line a method and its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.tables import Column, markdown, mean_and_spread, shown_mib
from corecontext.config import PAPER_RULE
from corecontext.record import Record
from reproduction.real_gains import ENDS, SAME, is_end, is_other_training
from reproduction.real_measured import MEASURED
from reproduction.real_methods import METHODS, TITLES
from reproduction.real_training import Adaptation

APART = (*SAME, *MEASURED, "task", "position", "needles", "lists", "over", "of")
"""Params that do not make another line."""
OTHER_WORDING = "8fbfb92"
"""Commit whose needles were worded otherwise: its shares of right answers are in no table."""
OF_WINDOWS = {"real.perplexity": "far", "real.gain_kept": "gain"}
"""Records whose values depend on the number of windows, and their names in tables."""
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


class Line(NamedTuple):
    """A method with its sizes, and its newest values by measure and seed."""

    params: dict[str, Any]
    values: dict[str, dict[int, float]]
    """By "far", "gain", a record's name, or a task and the tokens of its prompts; then by seed.
    Names of perplexities and gains of fewer windows than the others' end in ":" and their
    number."""
    cache: dict[str, Any]
    """device_bytes and host_bytes after a window."""


def real_markdown(records: Sequence[Record], *, trained: bool, short: bool = False) -> str:
    """Return the table of models as they are, or of trained ones; means over the seeds. Indices
    without answers have a table of their own.

    Args:
        short: Only SHORT, with mass; of fetch that at equal bytes where there is any, or else the
            stores on the host where there are any.
    """
    lines = [
        line
        for line in lines_of(records, trained=trained)
        if line.params["method"] != "fetch" or tasks_of(line)
    ]
    # Results do not depend on the store: with both measured, the host's bytes say more.
    on_host = [line.params for line in lines if line.params["store"] == "host"]
    lines = [
        line
        for line in lines
        if line.params["store"] == "host" or {**line.params, "store": "host"} not in on_host
    ]
    if short:
        stores = {line.params["store"] for line in lines}
        unshown = {"device"} if "host" in stores else set()
        methods = set(SHORT)
        if any(line.params["method"] == "fetch_equal_bytes" for line in lines):
            methods.remove("fetch")
        lines = [
            line
            for line in lines
            if line.params["method"] in methods
            and line.params["core_mass"] is not False
            and line.params["store"] not in unshown
        ]
        # Of the settings at equal bytes the best.
        equal = [line for line in lines if line.params["method"] == "fetch_equal_bytes"]
        equal.sort(key=lambda line: line.values["far"][0])
        lines = [line for line in lines if line not in equal[1:]]
    columns = [
        Column("attention", _title, left=True),
        Column("cache, MiB", lambda line: _cache(line, "device_bytes")),
        Column("perplexity, far", lambda line: _mean(line, "far", "{:.3f}")),
        Column("gain kept", _gain),
    ]
    if short:
        columns[0] = Column("SmolLM2-135M-Instruct as it is, 8,192 tokens", name_of, left=True)
    if any(line.cache.get("host_bytes") for line in lines):
        columns.insert(2, Column("on the host, MiB", lambda line: _cache(line, "host_bytes")))
    if any(len(line.values["far"]) > 1 for line in lines):
        columns.insert(1, Column("seeds", _seeds))
    return _table(columns, lines)


def extended_markdown(records: Sequence[Record]) -> str:
    """Return the table of models trained on windows beyond their own, with a new rotary base."""
    lines = lines_of(records, trained=True, extended=True)
    columns = [
        Column("attention", _title, left=True),
        Column("tokens, millions", _millions),
        Column("training, s", lambda line: _mean(line, "real.training_s", "{:.0f}")),
        Column("training, GiB", lambda line: _mean(line, "real.training_bytes", "{:.1f}", 2**-30)),
        Column("cache, MiB", lambda line: _cache(line, "device_bytes")),
    ]
    positions = {name for line in lines for name in line.values if "/" in name}
    for place in sorted(positions):
        columns.append(Column(f"perplexity, {place}", partial(_mean, name=place, form="{:.2f}")))
    return _table(columns, lines)


def tries_markdown(records: Sequence[Record]) -> str:
    """Return the table of other trainings than the protocol's, and of shorter ones."""
    columns = [
        Column("attention", _title, left=True),
        Column("training", _training, left=True),
        Column("tokens, millions", _millions),
        Column("perplexity, far", lambda line: _mean(line, "far", "{:.3f}")),
        Column("gain kept", _gain),
    ]
    lines = lines_of(records, trained=True, tries=True)
    if any(len(line.values["far"]) > 1 for line in lines):
        columns.insert(2, Column("seeds", _seeds))
    return _table(columns, lines)


def _millions(line: Line) -> str:
    """Return the tokens of a training."""
    return f"{line.params['trained_tokens'] / 1e6:.1f}"


def _training(line: Line) -> str:
    """Return in words how a training differs from the protocol's."""
    p = line.params
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


def lines_of(
    records: Sequence[Record], *, trained: bool, extended: bool = False, tries: bool = False
) -> list[Line]:
    """Collect the newest values of each method and size, in the order of METHODS; those of fewer
    windows under a name of their own.

    Args:
        extended: Trained on windows beyond the model's own.
        tries: Other or shorter trainings than the protocol's.
    """
    lines: dict[str, Line] = {}
    most = protocol_tokens(records)
    records = [
        record
        for record in records
        if bool(record.params["trained_tokens"]) == trained
        and (record.params.get("rope_theta") is not None) == extended
    ]
    most_windows = max((record.params.get("windows", 0) for record in records), default=0)
    for record in records:
        is_try = is_other_training(record.params) or record.params["trained_tokens"] < most
        if trained and not extended and is_try != tries:
            continue
        if record.name == "real.accuracy" and (record.commit or "").startswith(OTHER_WORDING):
            continue
        params = {name: value for name, value in record.params.items() if name not in APART}
        if tries or extended:
            params["trained_tokens"] = record.params["trained_tokens"]
        line = lines.setdefault(repr(sorted(params.items())), Line(params, {}, {}))
        name = record.name
        if name == "real.accuracy":
            name = f"{record.params['task']} {record.params['length']}"
        elif record.params["task"] == "position":
            name = record.params["position"]
        elif name in OF_WINDOWS:
            windows = record.params.get("windows", most_windows)
            is_far = name == "real.perplexity"
            name = OF_WINDOWS[name]
            if windows < most_windows:
                name += f":{windows}"
            elif is_far:
                line.cache.update({size: record.params[size] for size in MEASURED})
        line.values.setdefault(name, {})[record.params["seed"]] = record.value
    measured = [line for line in lines.values() if {"far", "real.recall"} & set(line.values)]
    return sorted(measured, key=lambda line: list(METHODS).index(line.params["method"]))


def _table(columns: list[Column], lines: Sequence[Line]) -> str:
    """Return a table with a column for each task at its end."""
    tasks = {task for line in lines for task in tasks_of(line)}
    for task, length in sorted(tasks, key=lambda task: (task[0] == "list", task[1])):
        right = partial(_mean, name=f"{task} {length}", form="{:.0f} %", scale=100)
        columns.append(Column(f"{task}, {length:,} tokens", right))
    return "\n".join(markdown(columns, lines)) + "\n"


def tasks_of(line: Line) -> list[tuple[str, int]]:
    """Return the tasks with answers, and the tokens of their prompts."""
    tasks = (name.split() for name in line.values if " " in name)
    return [(task, int(length)) for task, length in tasks]


def name_of(line: Line) -> str:
    """Return a method's short name."""
    p = line.params
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


def _title(line: Line) -> str:
    """Return a method in words, with the sizes that it has."""
    p = line.params
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


def _seeds(line: Line) -> str:
    return str(len(line.values["far"]))


def _cache(line: Line, name: str) -> str:
    value = line.cache[name]
    return "" if value is None else shown_mib(value).removesuffix(" MiB")


def _gain(line: Line) -> str:
    """Show the gain kept, the ends by definition."""
    if is_end(line.params):
        return ENDS[line.params["method"]]
    return _mean(line, "gain", "{:.1f} %", 100)


def _mean(line: Line, name: str, form: str, scale: float = 1) -> str:
    """Show a mean over seeds, and from two on their spread."""
    return mean_and_spread([scale * x for x in line.values.get(name, {}).values()], form)
