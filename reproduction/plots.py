"""The reproduction's figures, PNG, drawn from records and the stages' curves and maps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from corecontext import drawing
from corecontext.files import atomic_path
from corecontext.record import Record
from corecontext.visibility import num_complete_groups, window_capacity
from reproduction.plan import (
    RIVALS,
    SCRATCH,
    SCRATCH_FINE,
    Size,
    from_scratch,
    later_seed,
    methods,
)


def draw_all(folder: Path, records: Sequence[Record], size: Size) -> dict[str, Path]:
    """Draw what there are records for; returns files by name."""
    pyplot, found = drawing.pyplot(), {}
    for name, draw in (
        ("methods", _methods),
        ("sizes", _sizes),
        ("flexibility", _flexibility),
        ("curves", _curves),
        ("scratch", _scratch),
        ("maps", _maps),
        ("cost", _cost),
    ):
        figure = draw(pyplot, folder, records, size)
        if figure is None:
            continue
        figure.tight_layout()
        with atomic_path(folder / f"{name}.png") as path:
            figure.savefig(path, dpi=130)
        pyplot.close(figure)
        found[name] = folder / f"{name}.png"
    return found


def _of(records: Sequence[Record], name: str, **params: Any) -> list[Record]:
    if name in ("quality.perplexity", "quality.gain_kept"):
        params["split"] = "test"
    return [
        one
        for one in records
        if one.name == name and all(one.params.get(k) == v for k, v in params.items())
    ]


def _methods(pyplot: Any, folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Gain kept, by method; what is not ours in gray."""
    points = []
    for name, method in methods(size).items():
        gains = [
            one[-1].value
            for seed in size.seeds
            if (one := _of(records, "quality.gain_kept", stage=f"{name}-{seed}"))
        ]
        if gains and method.trains:
            ours = method.config is not None and name not in RIVALS
            points.append(
                (100 * sum(gains) / len(gains), method.title, "#c65d12" if ours else "#9a9a9a")
            )
    if not points:
        return None
    figure, panel = pyplot.subplots(figsize=(8, 0.3 * len(points) + 1.2))
    points.sort(key=lambda one: one[0])
    gains, titles, colors = zip(*points)
    panel.barh(titles, gains, color=colors)
    panel.axvline(60, color="gray", ls=":")
    panel.set_xlabel(
        "share of the long-range gain kept, %", loc="right"
    )  # the titles leave it little room
    return figure


def _sizes(pyplot: Any, folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Tables 8 and 9 as curves."""
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4))
    drawn = False
    for panel, letter, values in ((panels[0], "g", size.groups), (panels[1], "s", size.windows)):
        points = []
        for value in values:
            some = _of(
                records,
                "quality.perplexity",
                stage=f"{letter}{value}-{later_seed(size)}",
                bucket="far",
            )
            points += [(value, some[-1].value)] if some else []
        if points:
            drawn = True
            panel.plot(*zip(*points), "o-", color="#c65d12")
        panel.set_xscale("log", base=2)
        panel.set_xlabel(letter)
        panel.set_ylabel("perplexity, far")
    if not drawn:
        pyplot.close(figure)
    return figure if drawn else None


def _flexibility(pyplot: Any, folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Perplexity against cache and time."""
    quality = _of(records, "quality.perplexity", stage="flexibility", bucket="far")
    if not quality or not _of(records, "model.cache_bytes", of="sizes"):
        return None
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.8))
    for panel, name, label, unit in (
        (panels[0], "model.cache_bytes", "cache, MiB", 2**20),
        (panels[1], "model.first_token_s", "prompt, ms", 1e-3),
    ):
        for s in size.windows:
            points = []
            for one in quality:
                if one.params["window_size"] == s:
                    cost = _of(
                        records,
                        name,
                        of="sizes",
                        group_size=one.params["group_size"],
                        window_size=s,
                    )
                    points += [(cost[-1].value / unit, one.value)] if cost else []
            if points:  # else the form would be taken for a value
                panel.plot(*zip(*sorted(points)), "o-", label=f"s = {s}")
        panel.set_xlabel(label)
        panel.set_ylabel("perplexity, far")
    panels[0].legend(fontsize=7)
    return figure


def _curves(pyplot: Any, folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Loss of adapting a model of the same and of a shorter context, in as many steps where both
    have been run."""
    seed = later_seed(size)
    same = [folder / name / "curve.jsonl" for name in (f"g{size.group}-{seed}", f"cca-{seed}")]
    curves = [
        (label, path)
        for label, path in (
            (
                "from a model of the same context",
                next((path for path in same if path.exists()), same[0]),
            ),
            ("from a model of a shorter context", folder / "from-short" / "curve.jsonl"),
        )
        if path.exists()
    ]
    if not curves:
        return None
    figure, panel = pyplot.subplots(figsize=(6.5, 3.6))
    looks = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for _, path in curves
    ]
    last = min(steps[-1]["step"] for steps in looks)
    for (label, _), steps in zip(curves, looks):
        steps = [one for one in steps if one["step"] <= last]
        width = max(1, len(steps) // 25)  # a batch is few texts
        smooth = np.convolve([one["loss"] for one in steps], np.ones(width) / width, "valid")
        panel.plot([one["step"] for one in steps[width - 1 :]], smooth, label=label)
    panel.set_xlabel("step")
    panel.set_ylabel("training loss")
    panel.legend()
    return figure


def _scratch(pyplot: Any, folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Held-out perplexity of the far half, and answers right, while training from scratch."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.8))
    for color, name in zip(
        ("#9a9a9a", "#c65d12", "#1f6fb4", "#5a9a5a", "#8458a6"), (*SCRATCH, *SCRATCH_FINE)
    ):
        paths = [
            folder / from_scratch(name, seed) / "curve.jsonl" for seed in dict.fromkeys(size.bases)
        ]
        label: str | None = name
        for path in (path for path in paths if path.exists()):
            steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            looks = [
                (one["tokens"] / 1e6, np.exp(one["val_far"])) for one in steps if "val_far" in one
            ]
            if looks:
                panels[0].plot(*zip(*looks), color=color, label=label)
            width = max(1, len(steps) // 100)
            right = np.convolve([one["right"] for one in steps], np.ones(width) / width, "valid")
            panels[1].plot(
                [one["tokens"] / 1e6 for one in steps[width - 1 :]],
                100 * right,
                color=color,
                label=label,
            )
            label = None
    panels[0].set_yscale("log")
    for axis_format in (panels[0].yaxis.set_major_formatter, panels[0].yaxis.set_minor_formatter):
        axis_format("{x:.0f}")
    for panel, label in zip(
        panels, ("validation perplexity, far", "answer tokens right in training, %")
    ):
        panel.set_xlabel("million tokens")
        panel.set_ylabel(label)
    if not panels[1].lines:
        pyplot.close(figure)
        return None
    panels[1].legend()
    return figure


def _maps(pyplot: Any, folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Mean attention of 32 tokens by layer, and the last token's."""
    path = folder / "maps" / "maps.npz"
    if not path.exists():
        return None
    with np.load(path) as held:
        short, last = held["short"], held["last"]
    chosen = sorted({round(i * (len(short) - 1) / 3) for i in range(4)})
    figure, panels = pyplot.subplots(
        2, len(chosen), figsize=(2.6 * len(chosen), 4.6), squeeze=False
    )
    for column, layer in enumerate(chosen):
        panels[0][column].imshow(short[layer], cmap="Oranges", vmin=0)
        panels[0][column].set_title(f"layer {layer}", fontsize=9)
        panels[1][column].semilogy(np.sort(last[layer].mean(0))[::-1], color="#c65d12")
        panels[1][column].set_xlabel("keys, by weight", fontsize=8)
    panels[1][0].set_ylabel("last token's weight")
    return figure


def _cost(pyplot: Any, folder: Path, records: Sequence[Record], size: Size) -> Any:
    """Cache of the 7B shape by length."""
    figure, panel = pyplot.subplots(figsize=(6.5, 3.4))
    lengths = [2**n for n in range(12, 18)]
    entry = 2 * 32 * 32 * 128 * 2 / 2**30
    count: Callable[[int], int] = lambda n: min(
        n, num_complete_groups(n, 16) + window_capacity(16, 1024)
    )
    panel.plot(lengths, [n * entry for n in lengths], "o-", label="full attention")
    panel.plot(lengths, [count(n) * entry for n in lengths], "o-", label="CCA, g = 16, s = 1024")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_xlabel("tokens")
    panel.set_ylabel("cache of LLaMA2-7B, GiB")
    panel.legend()
    return figure
