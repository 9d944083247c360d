"""Estimate the time of a run of the demo by a measured beginning of its prompt."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from corecontext.cost import ModelCost
from corecontext.demo.measure_method import DECODE_STEPS, DECODE_WARM_UP, read, step
from corecontext.loading import load

BEGINNING = 512
"""Tokens that are read for the estimate."""
STEPS = 5
"""Tokens that are decoded for it."""
ANSWER_STEPS = 16
"""Tokens of an answer and its question."""


@dataclass(frozen=True)
class Pace:
    """Say how fast a machine runs a model."""

    cost: ModelCost
    start_s: float
    """To start a process and load the model in it; 0 where there is one process only."""
    tokens: int
    """Of the beginning."""
    beginning_s: float
    step_s: float

    @classmethod
    def of(cls, model: str, dtype: str, device: str, token_ids: list[int]) -> Pace:
        """Measure a model under full attention."""
        import torch

        loaded = load(model, method="full", dtype=dtype, device=device)
        is_cpu = loaded.model.device.type == "cpu"
        start_s = time.process_time() if is_cpu else 0.0  # imports included
        ids = token_ids[:BEGINNING]
        with torch.inference_mode():
            read(loaded.model, ids)  # a first call loads code
            reading = read(loaded.model, ids)
            seconds = []
            for _ in range(STEPS):
                begin = time.perf_counter()
                int(step(loaded.model, reading.first, reading.cache))
                seconds.append(time.perf_counter() - begin)
        cost = ModelCost.of(loaded.model.config, loaded.model)
        return cls(cost, start_s, len(ids), reading.seconds, statistics.median(seconds))

    def run_seconds(self, methods: int, prompts: int, length: int) -> float:
        """Estimate the seconds of a run, each method as fast as full attention."""
        operations = self.cost.prefill_flops(length) / self.cost.prefill_flops(self.tokens)
        steps = DECODE_STEPS + DECODE_WARM_UP + prompts * ANSWER_STEPS
        each = self.start_s + prompts * operations * self.beginning_s + steps * self.step_s
        return methods * each
