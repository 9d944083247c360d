"""Figures of whole models: latency and memory by length (the paper's Figure 4), latency by g and s
(its Figure 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.model_report import Place, by_model, labels, main_places, places
from corecontext.drawing import CCA, FLEX, FLOOR, FULL, pyplot, save
from corecontext.record import Record

PANELS = (
    ("model.first_token_s", "first token, s", 1),
    ("model.next_token_ms", "next token, ms", 1),
    ("model.cache_bytes", "cache, GiB", 2**30),
    ("model.peak_bytes", "peak memory, GiB", 2**30),
)
SHADES = {
    "full": FULL,
    "full (flash)": FULL,
    "full (cuDNN)": "#4d4d4d",
    "full (rows)": "#a0a0a0",
    "StreamingLLM": FLEX,
    "CCA, some heads raw": "#8458a6",
}


def draw_model(records: Sequence[Record], path: str) -> None:
    """Four panels for each model: first token, next token, cache and peak memory by length, on the
    last device."""
    found = [
        place
        for place in main_places(places(records))
        if place.device == records[-1].device
        and any(place.values.get(name) for name, _, _ in PANELS)
    ]
    models = _varied(found, lambda place: place.length)
    figure, axes = pyplot().subplots(
        max(1, len(models)),
        len(PANELS),
        figsize=(14, 3.2 * max(1, len(models))),
        squeeze=False,
        layout="constrained",
    )
    for line, of_model in zip(axes, models):
        for axis, (name, title, unit) in zip(line, PANELS):
            for label in labels(of_model, name):
                kind = label.removesuffix(", static cache").removesuffix(", fused")
                color = SHADES.get(kind) or CCA  # CCA has many labels
                style = "--" if label.endswith((", static cache", ", fused")) else "-"
                _line(
                    axis,
                    {p.length: p.value(name, label) for p in of_model},
                    unit,
                    label,
                    color,
                    style,
                )
            _line(
                axis,
                {p.length: p.floors.get((name, "cca")) for p in of_model},
                unit,
                "least for CCA",
                FLOOR,
                ":",
            )
            _dress(axis, title, "length")
        p = of_model[0].params
        line[0].set_ylabel(
            f"{p['shape']} ({p['weights']} weights)\n{p['dtype']}, g = {p['group_size']}, "
            f"s = {p['window_size']}",
            fontsize=8,
        )
    figure.suptitle(records[-1].device, fontsize=9)
    save(figure, path)


def draw_sweep(records: Sequence[Record], path: str) -> None:
    """First and next token of CCA by g and by s, at each model's length that has most of them."""
    found = [place for place in places(records) if place.device == records[-1].device]
    models = _varied(found, lambda place: (place.params["group_size"], place.params["window_size"]))
    figure, axes = pyplot().subplots(
        max(1, len(models)),
        4,
        figsize=(14, 3.2 * max(1, len(models))),
        squeeze=False,
        layout="constrained",
    )
    for line, of_model in zip(axes, models):
        lengths = [place.length for place in of_model]
        length = max(dict.fromkeys(lengths), key=lengths.count)
        here = [place for place in of_model if place.length == length]
        for axes_of_name, (name, title, _) in zip((line[:2], line[2:]), PANELS[:2]):
            for axis, varied, fixed in zip(
                axes_of_name, ("group_size", "window_size"), ("window_size", "group_size")
            ):
                values = [place.params[fixed] for place in here]
                most = max(dict.fromkeys(values), key=values.count)
                series = sorted(
                    (p for p in here if p.params[fixed] == most), key=lambda p: p.params[varied]
                )
                for label in labels(series, name):
                    if label.startswith("CCA") and sum(
                        p.value(name, label) is not None for p in series
                    ) >= min(2, len(series)):  # a lone point of another run shows no course
                        _line(
                            axis,
                            {p.params[varied]: p.value(name, label) for p in series},
                            1,
                            label,
                            CCA,
                            "--" if label.endswith(", fused") else "-",
                        )
                _dress(
                    axis,
                    f"{title} ({'s' if fixed == 'window_size' else 'g'} = {most})",
                    "g" if varied == "group_size" else "s",
                )
                axis.set_yscale("linear")
                axis.set_ylim(bottom=0)
        p = of_model[0].params
        line[0].set_ylabel(
            f"{p['shape']} ({p['weights']} weights)\n{p['dtype']}, L = {length}", fontsize=8
        )
    figure.suptitle(records[-1].device, fontsize=9)
    save(figure, path)


def _varied(found: Sequence[Place], what: Callable[[Place], Any]) -> list[list[Place]]:
    """The models measured at several values; all where none was."""
    models = list(by_model(found).values())
    return [one for one in models if len({what(place) for place in one}) > 1] or models


def _line(
    axis: Any, points: dict[int, float | None], unit: float, label: str, color: str, style: str
) -> None:
    known = sorted((x, y / unit) for x, y in points.items() if y is not None)
    if known:
        axis.plot(*zip(*known), style, marker="o", markersize=3, color=color, label=label)


def _dress(axis: Any, title: str, x: str) -> None:
    """Title, scales and, where there is anything to explain, a legend."""
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.tick_params(labelsize=7)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    if axis.lines:
        axis.legend(fontsize=5, ncols=1 + (len(axis.lines) > 6), loc="best")
