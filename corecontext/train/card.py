"""The model card of a finished run: its settings, data, losses, and their curve."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from corecontext.data.documents import HUB, HubName
from corecontext.record import source_version, versions
from corecontext.train.before_after import Comparison
from corecontext.train.train_config import TrainConfig

FIGURE = "loss.png"
_PRIVATE = ("output", "cache_dir", "workers")
"""Settings that the card does not show."""

_CARD = """\
---
{header}
---

# {name}

A language model with {attention}, trained by strategy `{strategy}` {origin} `{model}`.

```python
from corecontext import from_pretrained

model = from_pretrained("PATH/TO/THIS/FOLDER")  # with the attention it was trained with
```

Without corecontext it loads as the ordinary model it is, with full attention.

{comparison}## Training

{facts}

![loss by step]({figure})

## Settings

```json
{settings}
```
"""


_COMPARISON = """\
## Before and after

| | far perplexity |{needle_title}
|---|---:|{needle_rule}
{lines}

Far perplexity: of the second half of {windows}.{needle_text}

"""


def losses(history: list[dict[str, Any]], key: str = "loss") -> list[tuple[int, float]]:
    """Return (step, value) of each entry in Trainer's log that has this key."""
    return [(entry["step"], entry[key]) for entry in history if key in entry]


def write(
    folder: Path,
    config: TrainConfig,
    history: list[dict[str, Any]],
    metrics: dict[str, float],
    tokens: int,
    comparison: Comparison | None = None,
) -> None:
    """Write README.md and the loss curve beside a final checkpoint, from Trainer's log (`history`),
    the `metrics` of the last evaluation, {} without, and the number of tokens that the run read."""
    curve = losses(history, "cross_entropy") or losses(history)
    _draw(folder / FIGURE, curve, losses(history, "eval_loss"))
    # The card shows only the last part of a path of this machine.
    is_local = Path(config.model).exists()
    model = Path(config.model).name if is_local else config.model
    settings = {name: value for name, value in config.to_dict().items() if name not in _PRIVATE}
    settings["model"] = model
    settings["data"] = [_public_name(name) for name in config.data]
    settings["eval_data"] = [_public_name(name) for name in config.eval_data]
    # The hub reads these fields at the head of the card.
    header = ModelCardData(
        library_name="transformers",
        tags=["corecontext", "long-context"],
        base_model=None if is_local or config.strategy == "scratch" else model,
    )
    datasets = [name for name in settings["data"] if name.startswith(HUB)]
    if datasets:
        header.datasets = [HubName.parse(name).identifier for name in datasets]

    facts = _facts(config, settings, history, metrics, tokens)
    text = _CARD.format(
        header=header.to_yaml(),
        name=Path(config.output).name,
        attention=_attention(config),
        strategy=config.strategy,
        origin="with the shape of" if config.strategy == "scratch" else "from",
        model=model,
        comparison=_comparison_table(comparison),
        facts="\n".join(f"- {fact}" for fact in facts),
        figure=FIGURE,
        settings=json.dumps(settings, indent=1),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _facts(
    config: TrainConfig,
    settings: dict[str, Any],
    history: list[dict[str, Any]],
    metrics: dict[str, float],
    tokens: int,
) -> list[str]:
    """Return the card's lines about the run; `settings` are those that it shows."""
    curve = losses(history)
    facts = [
        f"{config.steps} steps, {tokens} tokens, rows of {config.context_length} tokens with "
        "documents kept apart",
        f"data: {', '.join(f'`{name}`' for name in settings['data'])}",
        f"loss: {curve[0][1]:.4f} at step {curve[0][0]}, {curve[-1][1]:.4f} at step {curve[-1][0]}",
    ]
    if config.is_idle():
        facts.append(
            "core tokens were idle: no query of these rows sees one, so this is a training under "
            "full attention"
        )
    if config.distil:
        facts.append(
            f"distilled: {config.distil:g} of this loss is the divergence from the predictions of "
            f"`{settings['model']}` as it was, under full attention"
        )
        entropy = losses(history, "cross_entropy")
        facts.append(f"cross-entropy: {entropy[0][1]:.4f} at first, {entropy[-1][1]:.4f} at last")
    if metrics:
        facts.append(
            f"evaluation: loss {metrics['eval_loss']:.4f}, perplexity "
            f"{metrics['eval_perplexity']:.3f}"
        )
    commit, dirty = source_version()
    state = " with changes" if dirty else ""
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    facts.append(f"code: commit {commit or 'unknown'}{state}, {packages}")
    return facts


def _comparison_table(comparison: Comparison | None) -> str:
    """Return the card's table of the model before and after; "" without a comparison."""
    if comparison is None:
        return ""
    has_needles = comparison.needles > 0
    lines = []
    for line in comparison.lines:
        text = f"| {line.title} | {line.perplexity:.3f} |"
        if has_needles:
            text += f" {line.answered} of {comparison.needles} |"
        lines.append(text)
    windows = f"{comparison.windows} windows of {comparison.window_tokens} tokens"
    if comparison.windows == 1:
        windows = f"a window of {comparison.window_tokens} tokens"
    texts = {"needle_title": "", "needle_rule": "", "needle_text": ""}
    if has_needles:
        texts = {
            "needle_title": " needles |",
            "needle_rule": "---:|",
            "needle_text": " Needles: numbers of seven digits hidden in "
            f"{comparison.needle_tokens} tokens of a book, and asked for.",
        }
    return _COMPARISON.format(lines="\n".join(lines), windows=windows, **texts)


def _attention(config: TrainConfig) -> str:
    """Return the run's attention in words."""
    if config.method != "cca":
        return f"{config.method} attention"
    sizes = f"g = {config.group_size}"
    if config.layer_group_sizes:
        sizes = f"g = {list(config.layer_group_sizes)} by layer"
    text = f"Core Context Aware attention, {sizes}, s = {config.window_size}"
    if config.sink_size:
        text += f", the first {config.sink_size} tokens raw"
    if config.cca().core_mass:
        text += ", core tokens with their masses"
    if config.fetch_groups:
        text += f", raw tokens of {config.fetch_groups} groups fetched by {config.fetch_index}"
    return text


def _public_name(name: str) -> str:
    """Return the name of data for a card: of a hub dataset in full, of a path the last part."""
    identifier = HubName.parse(name).identifier if name.startswith(HUB) else name
    if name.startswith(HUB) and not Path(identifier).exists():
        return name
    return Path(name).name


def _draw(path: Path, curve: list[tuple[int, float]], evaluated: list[tuple[int, float]]) -> None:
    """Draw the cross-entropy of training (`curve`) and of evaluations, (step, value) each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*curve), color="tab:blue", linewidth=1, label="training")
    if evaluated:
        axes.plot(*zip(*evaluated), color="tab:red", marker="o", markersize=3, label="evaluation")
        axes.legend(frameon=False)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
