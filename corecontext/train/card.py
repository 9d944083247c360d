"""The model card of a finished run: its settings, its data, its losses, and their curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from corecontext.data.documents import HUB, HubName
from corecontext.record import source_version, versions
from corecontext.train.train_config import TrainConfig

FIGURE = "loss.png"


def losses(history: list[dict[str, Any]], key: str = "loss") -> list[tuple[int, float]]:
    """A number by step, from Trainer's log."""
    return [(entry["step"], entry[key]) for entry in history if key in entry]


def write(
    folder: Path,
    config: TrainConfig,
    history: list[dict[str, Any]],
    metrics: dict[str, float],
    tokens: int,
) -> None:
    """README.md and the loss curve beside a final checkpoint."""
    curve, evaluated = losses(history), losses(history, "eval_loss")
    _draw(folder / FIGURE, curve, evaluated, config.distil)
    commit, dirty = source_version()
    first = f", the first {config.sink_size} tokens raw" if config.sink_size else ""
    sizes = (
        f"g = {list(config.layer_group_sizes)} by layer"
        if config.layer_group_sizes
        else f"g = {config.group_size}"
    )
    attention = (
        f"Core Context Aware attention, {sizes}, s = {config.window_size}{first}"
        if config.method == "cca"
        else f"{config.method} attention"
    )
    model = Path(config.model).name if Path(config.model).exists() else config.model
    settings = {
        **config.to_dict(),
        "model": model,
        "data": [_public(name) for name in config.data],
        "eval_data": [_public(name) for name in config.eval_data],
        "deepspeed": config.deepspeed and Path(config.deepspeed).name,
    }
    for private in ("output", "cache_dir", "workers", "push_to"):
        del settings[private]
    lines = [
        "---",
        "library_name: transformers",
        "tags: [corecontext, long-context]",
        *(
            [f"base_model: {model}"]
            if model == config.model and config.strategy != "scratch"
            else []
        ),
        *([f"datasets: [{', '.join(found)}]"] if (found := _datasets(config)) else []),
        "---",
        "",
        f"# {Path(config.output).name}",
        "",
        f"A language model with {attention}, trained by strategy `{config.strategy}` "
        f"{'with the shape of' if config.strategy == 'scratch' else 'from'} `{model}`.",
        "",
        "```python",
        "from corecontext import from_pretrained",
        "",
        'model = from_pretrained("PATH/TO/THIS/FOLDER")  # with the attention it was trained with',
        "```",
        "",
        "Without corecontext it loads as the ordinary model it is, with full attention.",
        "",
        "## Training",
        "",
        f"- {config.steps} steps, {tokens} tokens, rows of "
        f"{config.context_length} tokens with documents kept apart",
        f"- data: {', '.join(f'`{name}`' for name in settings['data'])}",
        f"- loss: {curve[0][1]:.4f} at step {curve[0][0]}, {curve[-1][1]:.4f} at step {curve[-1][0]}",
        *(
            [
                f"- distilled: {config.distil:g} of this loss is the divergence from the predictions of `{model}` as "
                "it was, under full attention"
            ]
            if config.distil
            else []
        ),
        *(
            [
                f"- evaluation: loss {metrics['eval_loss']:.4f}, perplexity {metrics['eval_perplexity']:.3f}"
            ]
            if metrics
            else []
        ),
        f"- code: commit {commit or 'unknown'}{' with changes' if dirty else ''}, "
        + ", ".join(f"{k} {v}" for k, v in versions().items()),
        "",
        f"![loss by step]({FIGURE})",
        "",
        "## Settings",
        "",
        "```json",
        json.dumps(settings, indent=1),
        "```",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _public(name: str) -> str:
    """What a card calls data: a dataset of the hub in full, of anything local the last part."""
    identifier = HubName.parse(name).identifier if name.startswith(HUB) else name
    return name if name.startswith(HUB) and not Path(identifier).exists() else Path(name).name


def _datasets(config: TrainConfig) -> list[str]:
    """The datasets of the hub among the data."""
    return [
        HubName.parse(name).identifier
        for name in config.data
        if name.startswith(HUB) and _public(name) == name
    ]


def _draw(
    path: Path, curve: list[tuple[int, float]], evaluated: list[tuple[int, float]], distil: float
) -> None:
    """Training and evaluation loss by step; only the former has a share that is a divergence."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        *zip(*curve),
        color="tab:blue",
        linewidth=1,
        label=f"training, {distil:g} of it divergence" if distil else "training",
    )
    if evaluated:
        axes.plot(*zip(*evaluated), color="tab:red", marker="o", markersize=3, label="evaluation")
        axes.legend(frameon=False)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
