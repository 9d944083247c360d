"""Train the miniature: one loop for base models, adaptations and training from scratch.

It can be cut short and resumed. Muon for the layers' matrices, AdamW for the rest, a cosine to a
tenth. Half of the rows are text, the others ask for facts planted in text or in passages; contexts
grow, because retrieval is learned at short ones first.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from corecontext.files import atomic_path
from corecontext.terminal import progress
from reproduction.optimizer_step import Step, half_stream, lr_factor, optimizers
from reproduction.texts import Batches, Corpus

SAVE_EVERY_S = 60.0


class OutOfTime(Exception):
    """The invocation's time is over; the training so far is saved."""


class Schedule(NamedTuple):
    """Contexts, steps and rate of a training."""

    levels: tuple[tuple[int, int], ...]
    """Contexts with the steps at each."""
    step_tokens: int
    """Tokens of a step."""
    lr: float
    seed: int
    trains: str = "all"
    """Parameters that are trained, as in `methods.Method`."""

    @property
    def steps(self) -> int:
        """Steps of all contexts."""
        return sum(count for _, count in self.levels)


class Watch(NamedTuple):
    """Callbacks of a training."""

    on_level: Callable[[int], Any] = lambda length: None
    """Called with each context after its steps."""
    on_step: Callable[[int], dict[str, float]] = lambda step: {}
    """Called with the number of steps done; its result joins the step's entry."""


@dataclass
class _Progress:
    """The state of a training that is saved and resumed."""

    model: LlamaForCausalLM
    optimizers: list[torch.optim.Optimizer]
    file: Path
    level: int = 0
    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[tuple[dict[str, Any], Tensor, Tensor]] = field(default_factory=list)
    """Steps whose results were not read yet."""
    saved_at: float = field(default_factory=time.monotonic)

    def resume(self) -> None:
        """Continue from the saved state, if there is one."""
        if not self.file.exists():
            return
        state = torch.load(self.file, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["opts"]):
            optimizer.load_state_dict(saved)
        self.level = state["level"]
        self.step = state["step"]
        self.history = state["history"]

    def save(self) -> None:
        """Save the state with the results of all steps."""
        self.settle()
        state = {
            "model": self.model.state_dict(),
            "opts": [optimizer.state_dict() for optimizer in self.optimizers],
            "level": self.level,
            "step": self.step,
            "history": self.history,
        }
        with atomic_path(self.file) as name:
            torch.save(state, name)
        self.saved_at = time.monotonic()

    def settle(self, keep: int = 0) -> None:
        """Read the results of all steps but the last few, so that the GPU never waits for them."""
        while len(self.waiting) > keep:
            entry, loss, right = self.waiting.pop(0)
            if not math.isfinite(loss):
                raise RuntimeError(
                    f"training {self.file.parent.name} diverged at step {entry['step']}. Take a "
                    "smaller rate."
                )
            results = {"loss": round(float(loss), 5), "right": round(float(right), 4)}
            self.history.append({**entry, **results})


def train(
    model: LlamaForCausalLM,
    corpus: Corpus,
    schedule: Schedule,
    folder: Path,
    *,
    teacher: LlamaForCausalLM | None = None,
    workers: int = 0,
    time_left: Callable[[], float] = lambda: math.inf,
    watch: Watch = Watch(),  # noqa: B008
) -> list[dict[str, Any]]:
    """Train from the state that `folder` was left in.

    Args:
        model: With the method's attention enabled by the caller.
        folder: state.pt is kept here until the end.
        workers: Processes that make batches.
        time_left: Seconds; at 0 all is saved and OutOfTime is raised.

    Returns:
        One entry a step: step, length, tokens so far, loss, share of answer tokens right.
    """
    model.train()
    device = str(model.device)
    run = Step(model, optimizers(model, schedule.lr, schedule.trains), device, teacher)
    state = _Progress(model, run.optimizers, folder / "state.pt")
    state.resume()
    tokens = state.history[-1]["tokens"] if state.history else 0
    title = progress(f"train {folder.name}", schedule.steps)
    with half_stream(model, device), title as advance:
        advance(state.step)
        while state.level < len(schedule.levels):
            length = schedule.levels[state.level][0]
            for ids, weights in _batches(corpus, schedule, state, workers):
                if time_left() <= 0:
                    state.save()
                    raise OutOfTime(folder.name)
                run.set_rates(lr_factor(state.step, schedule.steps))
                loss, right = run(ids, weights)
                state.step += 1
                tokens += ids.numel()
                entry = {
                    "step": state.step,
                    "level": state.level,
                    "length": length,
                    "tokens": tokens,
                    **watch.on_step(state.step),
                }
                state.waiting.append((entry, loss, right))
                state.settle(keep=1)
                advance(1)
                if time.monotonic() - state.saved_at > SAVE_EVERY_S:
                    state.save()
            state.settle()
            watch.on_level(length)
            state.level += 1
    model.eval()
    return state.history


def _batches(
    corpus: Corpus, schedule: Schedule, state: _Progress, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the remaining batches of the current context."""
    length, count = schedule.levels[state.level]
    done = sum(entry["level"] == state.level for entry in state.history)
    rows = max(1, schedule.step_tokens // length)
    yield from torch.utils.data.DataLoader(
        Batches(corpus, schedule.seed, length, rows),
        batch_size=None,
        sampler=range(state.step, state.step + count - done),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        pin_memory=state.model.device.type == "cuda",
    )


def thinned(history: Sequence[dict[str, Any]], most: int = 250) -> list[dict[str, Any]]:
    """Return a curve of about `most` points: means of equally many steps.

    A point ends, too, where held-out text was evaluated.
    """
    points: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for entry in history:
        steps.append(entry)
        if len(steps) >= len(history) / most or "val" in entry or entry is history[-1]:
            means = {
                key: round(sum(step[key] for step in steps) / len(steps), 5)
                for key in ("loss", "right")
            }
            points.append({**entry, **means})
            steps = []
    return points
