"""Write the tables of fetch from its records: passes of the operator, steps and whole models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from benchmarks.operator_report import LABELS
from benchmarks.tables import Column, markdown, optional, shown_bytes, shown_ms, shown_us
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
MODEL_COLUMNS = (
    Column("", lambda place: MODELS[place[0]], left=True),
    Column("tokens", lambda place: f"{place[1]:,}"),
    Column("slots", lambda place: "" if place[2] is None else str(place[2])),
)
"""Columns of a whole model's method, length and slots."""
shown_passes = optional(shown_ms)
shown_steps = optional(shown_us)
shown_memory = optional(shown_bytes)


def fetch_markdown(records: Sequence[Record]) -> str:
    """Return the tables of the operator's passes, of its decoding step, and of whole models."""
    lines = _pass_table(records)
    lines += ["", "One decoding step of one layer:", "", *_step_table(records)]
    lines += ["", "Llama-3.1-8B's shape, random weights:", "", *_model_table(records)]
    lines += ["", "Tokens per second of decoding, the best batch:", "", *_rate_table(records)]
    return "\n".join(lines) + "\n"


def _newest(
    records: Sequence[Record], names: Sequence[str], sizes: Sequence[str]
) -> dict[tuple[Any, ...], float]:
    """Return the newest values by name, method and sizes; of passes those without a CUDA graph."""
    return {
        (r.name, r.params["method"], *(r.params.get(size) for size in sizes)): r.value
        for r in records
        if r.name in names and (r.params.get("timer") != "graph" or r.name.endswith("decode_us"))
    }


def _pass_table(records: Sequence[Record]) -> list[str]:
    passes = {f"operator.{name}_ms": LABELS[name] for name in ("forward", "forward_backward")}
    values = _newest(records, list(passes), ("kv_heads", "length"))
    columns = [
        Column("", lambda place: passes[place[0]], left=True),
        Column("KV heads", lambda place: str(place[1])),
        Column("tokens", lambda place: f"{place[2]:,}"),
    ]

    def cell(place: tuple[Any, ...], method: str) -> str:
        return shown_passes(values.get((place[0], method, *place[1:])))

    columns += [Column(title, partial(cell, method=name)) for name, title in OPERATORS.items()]
    places = {(name, *sizes) for name, _, *sizes in values}
    return markdown(columns, sorted(places, key=lambda at: (list(passes).index(at[0]), *at[1:])))


def _step_table(records: Sequence[Record]) -> list[str]:
    values = _newest(records, ["operator.decode_us"], ("kv_heads", "length", "batch"))
    columns = [
        Column("KV heads", lambda place: str(place[0])),
        Column("tokens", lambda place: f"{place[1]:,}"),
        Column("batch", lambda place: str(place[2])),
    ]

    def cell(place: tuple[Any, ...], method: str) -> str:
        return shown_steps(values.get(("operator.decode_us", method, *place)))

    columns += [Column(title, partial(cell, method=name)) for name, title in STEPS.items()]
    return markdown(columns, sorted({tuple(sizes) for _, _, *sizes in values}))


def _model_table(records: Sequence[Record]) -> list[str]:
    shows = {
        "first_token_s": ("first token", optional(lambda seconds: f"{seconds:.2f} s")),
        "next_token_ms": ("next token", shown_passes),
        "cache_bytes": ("cache on the device", shown_memory),
        "host_bytes": ("in host memory", shown_memory),
    }
    names = [f"model.{name}" for name in shows]
    values = _newest(records, names, ("length", "fetch_slots"))

    def cell(place: tuple[Any, ...], name: str) -> str:
        return shows[name][1](values.get((f"model.{name}", *place)))

    shown = [Column(title, partial(cell, name=name)) for name, (title, _) in shows.items()]
    places = {tuple(place) for name, *place in values if name == "model.next_token_ms"}
    return markdown([*MODEL_COLUMNS, *shown], sorted(_of_models(places), key=_in_order))


def _rate_table(records: Sequence[Record]) -> list[str]:
    values = _newest(records, ["model.tokens_per_s"], ("length", "fetch_slots", "batch"))
    best: dict[tuple[Any, ...], tuple[float, int]] = {}
    for (_, *place, batch), value in values.items():
        best[tuple(place)] = max(best.get(tuple(place), (0.0, 0)), (value, batch))
    columns = [
        *MODEL_COLUMNS,
        Column("batch", lambda place: str(best[place][1])),
        Column("tokens per second", lambda place: f"{best[place][0]:,.0f}"),
    ]
    return markdown(columns, sorted(_of_models(best), key=_in_order))


def _of_models(places: Iterable[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Return the places of methods that are shown."""
    return {place for place in places if place[0] in MODELS}


def _in_order(place: tuple[Any, ...]) -> tuple[int, ...]:
    """Order by method, length and slots."""
    method, length, slots = place
    return list(MODELS).index(method), length, slots or 0
