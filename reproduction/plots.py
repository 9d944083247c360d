"""Draw the reproduction's figures, PNG, from records and the stages' curves and maps."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.drawing import CCA, FLEX, FULL, pyplot
from benchmarks.plotting import finish, label_lines
from corecontext.files import atomic_path
from corecontext.record import Record
from corecontext.visibility import num_complete_groups, window_capacity
from reproduction.methods import SCRATCH, SCRATCH_FINE, methods
from reproduction.plan import from_scratch, later_seed
from reproduction.sizes import Size

OURS = "#c65d12"
COLORS = (FULL, OURS, CCA, FLEX, "#8458a6")
TARGET = 60  # percent of the gain, the project's target


def draw_all(folder: Path, records: Sequence[Record], size: Size) -> dict[str, Path]:
    """Draw the figures that have records; returns the files by name."""
    drawn = {}
    for name, draw in FIGURES.items():
        figure = draw(folder, records, size)
        if figure is None:
            continue
        with atomic_path(folder / f"{name}.png") as path:
            figure.savefig(path, dpi=130)
        pyplot().close(figure)
        drawn[name] = folder / f"{name}.png"
    return drawn


def _select(records: Sequence[Record], name: str, **params: Any) -> list[Record]:
    """Return the records with these params; perplexities and gains of the test split."""
    if name in ("quality.perplexity", "quality.gain_kept"):
        params["split"] = "test"
    return [
        record
        for record in records
        if record.name == name
        and all(record.params.get(key) == value for key, value in params.items())
    ]


def _newest(records: Sequence[Record], name: str, **params: Any) -> float | None:
    """Return the value of the last record with these params."""
    selected = _select(records, name, **params)
    return selected[-1].value if selected else None


def _figure(columns: int, width: float, height: float) -> tuple[Any, Any]:
    return pyplot().subplots(1, columns, figsize=(width, height), layout="constrained")


def _dress(panel: Any, title: str, x_label: str) -> None:
    """Give a panel its title, plain numbers and a label at the end of each line."""
    panel.set_title(title, fontsize=9, loc="left")
    panel.set_xlabel(x_label, fontsize=8)
    panel.tick_params(labelsize=7, which="both")
    panel.spines[["top", "right"]].set_visible(False)
    label_lines(panel)


def _methods(folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Draw the gain kept by method, rivals and full attention in gray."""
    bars = []
    for name, method in methods(size).items():
        stages = [f"{name}-{seed}" for seed in size.seeds]
        gains = [_newest(records, "quality.gain_kept", stage=stage) for stage in stages]
        kept = [gain for gain in gains if gain is not None]
        if kept and method.trains:
            color = OURS if method.is_ours else FULL
            bars.append((100 * fmean(kept), method.title, color))
    if not bars:
        return None
    bars.sort(key=lambda bar: bar[0])
    gains, titles, colors = zip(*bars)
    figure, panel = _figure(1, 8, 0.3 * len(bars) + 1.2)
    panel.barh(titles, gains, color=colors)
    panel.axvline(TARGET, color="gray", ls=":")
    panel.spines[["top", "right"]].set_visible(False)
    # The titles leave the label little room.
    panel.set_xlabel("share of the long-range gain kept, %", loc="right")
    return figure


def _sizes(folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Draw Tables 8 and 9 as curves."""
    figure, panels = _figure(2, 9, 3.4)
    for panel, letter, values in ((panels[0], "g", size.groups), (panels[1], "s", size.windows)):
        points = []
        for value in values:
            stage = f"{letter}{value}-{later_seed(size)}"
            perplexity = _newest(records, "quality.perplexity", stage=stage, bucket="far")
            if perplexity is not None:
                points.append((value, perplexity))
        if points:
            panel.plot(*zip(*points), "o-", color=OURS, label="CCA")
        finish(panel, "perplexity, far", letter)
    return _kept(figure, panels)


def _kept(figure: Any, panels: Sequence[Any]) -> Any:
    """Return a figure, or None where no panel has a line."""
    if any(panel.lines for panel in panels):
        return figure
    pyplot().close(figure)
    return None


def _flexibility(folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Draw perplexity against cache and time."""
    quality = _select(records, "quality.perplexity", stage="flexibility", bucket="far")
    if not quality or not _select(records, "model.cache_bytes", of="sizes"):
        return None
    figure, panels = _figure(2, 10, 3.8)
    for panel, name, label, unit in (
        (panels[0], "model.cache_bytes", "cache, MiB", 2**20),
        (panels[1], "model.first_token_s", "prompt, ms", 1e-3),
    ):
        for s, color in zip(size.windows, COLORS):
            points = []
            for record in quality:
                sizes = {key: record.params[key] for key in ("group_size", "window_size")}
                cost = _newest(records, name, of="sizes", **sizes)
                if sizes["window_size"] == s and cost is not None:
                    points.append((cost / unit, record.value))
            if points:
                panel.plot(*zip(*sorted(points)), "o-", color=color, label=f"s = {s}")
        _dress(panel, "perplexity, far, by g", label)
    return figure


def _read_curve(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _smooth(steps: Sequence[dict[str, Any]], key: str, points: int) -> tuple[int, np.ndarray]:
    """Return a moving average over a curve, and the first step that has one."""
    width = max(1, len(steps) // points)  # a batch is few texts
    values = np.convolve([step[key] for step in steps], np.ones(width) / width, "valid")
    return width - 1, values


def _curves(folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Draw the loss of adapting a model of the same and of a shorter context, in equal steps."""
    seed = later_seed(size)
    same = [folder / name / "curve.jsonl" for name in (f"g{size.group}-{seed}", f"cca-{seed}")]
    shorter = folder / "from-short" / "curve.jsonl"
    curves = {}
    for context, paths in (("the same", same), ("a shorter", [shorter])):
        existing = [path for path in paths if path.exists()]
        if existing:
            curves[f"from a model of {context} context"] = _read_curve(existing[0])
    if not curves:
        return None
    figure, panel = _figure(1, 7.5, 3.6)
    last = min(steps[-1]["step"] for steps in curves.values())
    for (label, steps), color in zip(curves.items(), (OURS, CCA)):
        steps = [step for step in steps if step["step"] <= last]
        first, losses = _smooth(steps, "loss", 25)
        panel.plot([step["step"] for step in steps[first:]], losses, color=color, label=label)
    _dress(panel, "training loss", "step")
    return figure


def _scratch(folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Draw held-out perplexity and right answers while training from scratch."""
    figure, panels = _figure(2, 10, 3.8)
    for color, name in zip(COLORS, (*SCRATCH, *SCRATCH_FINE)):
        stages = [from_scratch(name, seed) for seed in dict.fromkeys(size.bases)]
        paths = [folder / stage / "curve.jsonl" for stage in stages]
        for number, path in enumerate(path for path in paths if path.exists()):
            label = f"_{name}" if number else name  # of several seeds the first is labelled
            line = {"color": color, "label": label}
            steps = _read_curve(path)
            looks = [
                (step["tokens"] / 1e6, np.exp(step["val_far"]))
                for step in steps
                if "val_far" in step
            ]
            if looks:
                panels[0].plot(*zip(*looks), **line)
            first, right = _smooth(steps, "right", 100)
            panels[1].plot([step["tokens"] / 1e6 for step in steps[first:]], 100 * right, **line)
    panels[0].set_yscale("log")
    _dress(panels[0], "validation perplexity, far", "million tokens")
    _dress(panels[1], "answer tokens right in training, %", "million tokens")
    return _kept(figure, panels[1:])


def _maps(folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Draw the mean attention of 32 tokens by layer, and the last token's."""
    path = folder / "maps" / "maps.npz"
    if not path.exists():
        return None
    with np.load(path) as arrays:
        short, last = arrays["short"], arrays["last"]
    layers = sorted({round(i * (len(short) - 1) / 3) for i in range(4)})
    figure, panels = pyplot().subplots(
        2, len(layers), figsize=(2.6 * len(layers), 4.6), squeeze=False, layout="constrained"
    )
    for (top, bottom), layer in zip(panels.T, layers):
        top.imshow(short[layer], cmap="Oranges", vmin=0)
        top.set_title(f"layer {layer}", fontsize=9)
        bottom.semilogy(np.sort(last[layer].mean(0))[::-1], color=OURS)
        bottom.set_xlabel("keys, by weight", fontsize=8)
    panels[1][0].set_ylabel("last token's weight")
    return figure


def _cost(folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Draw the cache of the 7B shape by length."""
    figure, panel = _figure(1, 7, 3.4)
    lengths = [2**n for n in range(12, 18)]
    entry = 2 * 32 * 32 * 128 * 2 / 2**30
    entries = [min(n, num_complete_groups(n, 16) + window_capacity(16, 1024)) for n in lengths]
    full = [n * entry for n in lengths]
    panel.plot(lengths, full, "o-", color=FULL, label="full attention")
    cca = [count * entry for count in entries]
    panel.plot(lengths, cca, "o-", color=OURS, label="CCA, g = 16, s = 1024")
    finish(panel, "cache of LLaMA2-7B, GiB")
    return figure


FIGURES = {
    "methods": _methods,
    "sizes": _sizes,
    "flexibility": _flexibility,
    "curves": _curves,
    "scratch": _scratch,
    "maps": _maps,
    "cost": _cost,
}
