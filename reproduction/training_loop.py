"""The miniature's training: one plain loop for base models, adaptations and training from scratch;
it can be cut short.

Muon for the layers' matrices, AdamW for the rest, a cosine to a tenth. Half of the rows are text,
the others ask for facts planted in text or in passages; contexts grow, because retrieval is learned
at short ones first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from corecontext.files import atomic_path
from corecontext.terminal import progress
from reproduction.optimizer_step import Step, half_stream, lr_factor, optimizers
from reproduction.plan import Method
from reproduction.texts import Batches, Corpus

SAVE_EVERY_S = 60.0


class OutOfTime(Exception):
    """The invocation's time is over; what was trained is saved."""


def train(
    model: LlamaForCausalLM,
    corpus: Corpus,
    method: Method,
    levels: tuple[tuple[int, int], ...],
    step_tokens: int,
    lr: float,
    seed: int,
    device: str,
    folder: Path,
    *,
    teacher: LlamaForCausalLM | None = None,
    workers: int = 0,
    time_left: Callable[[], float] = lambda: math.inf,
    on_level: Callable[[int], Any] = lambda length: None,
    on_step: Callable[[int], dict[str, float]] = lambda step: {},
) -> list[dict[str, Any]]:
    """Train under a method, from where `folder` was left.

    Args:
        model: With the method's attention enabled by the caller.
        levels: Contexts with the steps at each.
        step_tokens: Tokens of a step.
        folder: state.pt is kept here until the end.
        time_left: Seconds; OutOfTime is raised, with everything saved, when there are none.
        on_level: Called with the context whenever one is done with.
        on_step: Called with the number of steps done; what it returns joins that step's entry.

    Returns:
        One entry a step: step, length, tokens so far, loss, share of answer tokens right.
    """
    model.train()
    opts = optimizers(model, lr, method.trains)
    run = Step(model, opts, device, teacher)
    state_file, history = folder / "state.pt", []
    level, step, steps = 0, 0, sum(count for _, count in levels)
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for one, saved in zip(opts, state["opts"]):
            one.load_state_dict(saved)
        level, step, history = state["level"], state["step"], state["history"]

    waiting: list[tuple[dict[str, Any], Tensor, Tensor]] = []

    def settle(keep: int = 0) -> None:
        """Read the results of all steps but the last few, so that the GPU always has something to
        do."""
        while len(waiting) > keep:
            entry, loss, right = waiting.pop(0)
            if not math.isfinite(loss):
                raise RuntimeError(
                    f"training {folder.name} diverged at step {entry['step']}. Take a smaller rate."
                )
            history.append(
                {**entry, "loss": round(float(loss), 5), "right": round(float(right), 4)}
            )

    def save() -> None:
        settle()
        with atomic_path(state_file) as name:
            torch.save(
                {
                    "model": model.state_dict(),
                    "opts": [one.state_dict() for one in opts],
                    "level": level,
                    "step": step,
                    "history": history,
                },
                name,
            )

    saved_at, tokens = time.monotonic(), history[-1]["tokens"] if history else 0
    with (
        half_stream(model, device),
        run.on_stream(),
        progress(f"train {folder.name}", steps) as advance,
    ):
        advance(step)
        while level < len(levels):
            length, most = levels[level]
            rows = max(1, step_tokens // length)
            done = sum(one["level"] == level for one in history)
            loader = torch.utils.data.DataLoader(
                Batches(corpus, seed, length, rows),
                batch_size=None,
                sampler=range(step, step + most - done),
                num_workers=workers,
                multiprocessing_context="fork" if workers else None,
                pin_memory=device.startswith("cuda"),
            )
            for ids, weights in loader:
                if time_left() <= 0:
                    save()
                    raise OutOfTime(folder.name)
                spent = sum(count for _, count in levels[:level]) + done
                for group in (g for one in opts for g in one.param_groups):
                    group["lr"].fill_(group["peak"] * lr_factor(spent, steps))
                loss, right = run(ids, weights)
                step, done, tokens = step + 1, done + 1, tokens + ids.numel()
                waiting.append(
                    (
                        {
                            "step": step,
                            "level": level,
                            "length": length,
                            "tokens": tokens,
                            **on_step(step),
                        },
                        loss,
                        right,
                    )
                )
                settle(keep=1)
                advance(1)
                if time.monotonic() - saved_at > SAVE_EVERY_S:
                    save()
                    saved_at = time.monotonic()
            del loader
            settle()
            on_level(length)
            level += 1
    model.eval()
    return history


def thinned(history: Sequence[dict[str, Any]], most: int = 250) -> list[dict[str, Any]]:
    """A curve of about so many points: the means of as many steps each, which end where held-out
    text was looked at."""
    found: list[dict[str, Any]] = []
    some: list[dict[str, Any]] = []
    for one in history:
        some.append(one)
        if len(some) >= len(history) / most or "val" in one or one is history[-1]:
            found.append(
                {
                    **one,
                    **{
                        key: round(sum(x[key] for x in some) / len(some), 5)
                        for key in ("loss", "right")
                    },
                }
            )
            some = []
    return found
