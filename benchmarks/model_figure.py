"""Draw figures of whole models: values by length, and CCA by group and window size."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.drawing import CCA, FLEX, FLOOR, FULL, pyplot, save
from benchmarks.model_report import Comparison, by_model, comparisons, labels, main_comparisons
from benchmarks.plotting import draw_line, finish
from benchmarks.tables import shown_tokens
from corecontext.record import Record

PANELS = (
    ("model.first_token_s", "first token, s", 1),
    ("model.next_token_ms", "next token, ms", 1),
    ("model.cache_bytes", "cache, GiB", 2**30),
    ("model.peak_bytes", "peak memory, GiB", 2**30),
)
COLORS = {
    "full": FULL,
    "full (flash)": FULL,
    "full (cuDNN)": "#4d4d4d",
    "full (rows)": "#a0a0a0",
    "StreamingLLM": FLEX,
    "CCA, some heads raw": "#8458a6",
}


def draw_model(records: Sequence[Record], path: str) -> None:
    """Draw first token, next token, cache and peak memory by length, on the last device.

    Of several models the one measured at the most lengths is drawn.
    """
    measured = [
        comparison
        for comparison in main_comparisons(comparisons(records))
        if comparison.device == records[-1].device
        and any(comparison.values.get(name) for name, _, _ in PANELS)
    ]
    of_model = _most_varied(measured, lambda comparison: comparison.length)
    figure, axes = pyplot().subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    for axis, (name, panel, unit) in zip(axes.flat, PANELS):
        for label in labels(of_model, name):
            values = {
                comparison.length: _scaled(comparison.value(name, label), unit)
                for comparison in of_model
            }
            draw_line(axis, values, label, _color(label), _style(label))
        floors = {
            comparison.length: _scaled(comparison.floors.get((name, "cca")), unit)
            for comparison in of_model
        }
        draw_line(axis, floors, "least for CCA", FLOOR, ":")
        finish(axis, panel)
    if of_model:
        figure.suptitle(
            f"{_gain_message(of_model)}\n{_settings(of_model)}", fontsize=11, x=0.01, ha="left"
        )
    save(figure, path)


def _gain_message(of_model: Sequence[Comparison]) -> str:
    """Say how CCA compares at the longest prompt."""
    last = of_model[-1]
    gains = {name: last.gain(name) for name, _, _ in PANELS}
    first = gains["model.first_token_s"]
    cache = gains["model.cache_bytes"]
    if first is None or cache is None:
        return "Whole models by length of the prompt"
    return (
        f"At {shown_tokens(last.length)} tokens CCA's first token comes {first:.1f} times as soon, "
        f"from a cache {cache:.1f} times as small"
    )


def _settings(of_model: Sequence[Comparison]) -> str:
    p = of_model[0].params
    return (
        f"{p['shape']} ({p['weights']} weights), {p['dtype']}, g = {p['group_size']}, "
        f"s = {p['window_size']}, {of_model[0].device}"
    )


def draw_sweep(records: Sequence[Record], path: str) -> None:
    """Draw first and next token of CCA by g and by s, at the length that has most of them."""
    measured = [
        comparison for comparison in comparisons(records) if comparison.device == records[-1].device
    ]
    of_model = _most_varied(measured, lambda comparison: comparison.config)
    counts = Counter(comparison.length for comparison in of_model)
    length = max(counts, key=lambda length: counts[length], default=0)
    here = [comparison for comparison in of_model if comparison.length == length]
    figure, axes = pyplot().subplots(2, 2, figsize=(9, 5.8), layout="constrained")
    for line, (name, panel, _) in zip(axes, PANELS[:2]):
        for axis, varied in zip(line, (0, 1)):
            _draw_size(axis, here, name, panel, varied)
    if here:
        p = here[0].params
        figure.suptitle(
            f"{_sweep_message(here)}\n"
            f"{p['shape']} ({p['weights']} weights), {p['dtype']}, {shown_tokens(length)} tokens, "
            f"{here[0].device}",
            fontsize=11,
            x=0.01,
            ha="left",
        )
    save(figure, path)


def _sweep_message(here: Sequence[Comparison]) -> str:
    """Say how much group and window size change the first token."""
    seconds = [
        value for comparison in here if (value := comparison.value("model.first_token_s", "CCA"))
    ]
    if not seconds:
        return "CCA by group and window size"
    return (
        f"Group and window size change the time to CCA's first token by at most "
        f"{max(seconds) / min(seconds) - 1:.0%}"
    )


def _draw_size(axis: Any, here: Sequence[Comparison], name: str, panel: str, varied: int) -> None:
    """Draw a panel by g (varied 0) or s (1), at the most frequent value of the other."""
    counts = Counter(comparison.config[1 - varied] for comparison in here)
    fixed = max(counts, key=lambda value: counts[value], default=0)
    series = [comparison for comparison in here if comparison.config[1 - varied] == fixed]
    for label in labels(series, name):
        values = {comparison.config[varied]: comparison.value(name, label) for comparison in series}
        measured = sum(value is not None for value in values.values())
        # A single point makes no line.
        if label.startswith("CCA") and measured >= min(2, len(series)):
            draw_line(axis, values, label, CCA, _style(label))
    texts = ("g, tokens a group", "s, tokens of the window")
    fixed_size = ("g", "s")[1 - varied]
    finish(axis, f"{panel} ({fixed_size} = {fixed})", texts[varied], log_y=False)


def _most_varied(
    measured: Sequence[Comparison], value: Callable[[Comparison], Any]
) -> list[Comparison]:
    """Return the comparisons of the model that was measured at the most values."""
    models = list(by_model(measured).values())
    return max(
        models,
        key=lambda comparisons: len({value(comparison) for comparison in comparisons}),
        default=[],
    )


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _color(label: str) -> str:
    kind = label.removesuffix(", static cache").removesuffix(", fused")
    return COLORS.get(kind, CCA)  # CCA has many labels


def _style(label: str) -> str:
    return "--" if label.endswith((", static cache", ", fused")) else "-"
