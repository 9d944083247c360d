"""Estimate the time of a run of the demo by two measured beginnings of its prompt."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, fetch_flops
from corecontext.demo.measure_method import (
    DECODE_STEPS,
    DECODE_WARM_UP,
    PREFILL_BUDGET_S,
    PREFILLS,
    read,
    step,
)
from corecontext.loading import load, pick_device
from corecontext.measure import package_path
from corecontext.ops.fetch.prompt_rule import reading_of
from corecontext.visibility import num_sinks

IMPORT = "import time, corecontext.demo.measure_method; print(time.process_time())"
IMPORTS = [sys.executable, "-W", "ignore", "-c", IMPORT]
"""A process that tells the seconds in which it has imported what a method needs."""
BEGINNING = 512
"""Tokens of the first beginning."""
SECOND_S = 2.0
"""Seconds for the second one, if each token took as long as in the first."""
LONGEST = 8192
"""Most tokens of the second one."""
STEPS = 5
"""Tokens that are decoded."""
ANSWER_STEPS = 16
"""Tokens of an answer and its question."""


class Work(NamedTuple):
    """Describe what a method does for a prompt."""

    attention: float
    """Operations besides those with the layers' weights, to read it."""
    cache_bytes: float
    """Bytes of the cache that a step reads."""


@dataclass(frozen=True)
class Pace:
    """Say how fast a machine runs a model, in seconds."""

    cost: ModelCost
    start_s: float
    """To start a process and load the model in it; 0 where there is one process only."""
    weights_s: float
    """For an operation with the layers' weights."""
    attention_s: float
    """For another operation."""
    byte_s: float
    """For a byte of weights or cache that a step reads."""

    @classmethod
    def of(cls, model: str, dtype: str, device: str, token_ids: list[int]) -> Pace:
        """Measure a model under full attention."""
        import torch

        # This process may have unpacked the model besides: another one tells what imports take.
        child = None
        if pick_device(device) == "cpu":
            child = subprocess.Popen(IMPORTS, stdout=subprocess.PIPE, env=package_path())
        before = time.process_time()
        loaded = load(model, method="full", dtype=dtype, device=device)
        start_s = 0.0
        if child is not None:
            start_s = time.process_time() - before + float(child.communicate()[0])
        cost = ModelCost.of(loaded.model.config, loaded.model)
        with torch.inference_mode():
            ids = token_ids[:BEGINNING]
            read(loaded.model, ids)  # a first call loads code
            first_s = read(loaded.model, ids).seconds
            more = token_ids[: min(LONGEST, int(len(ids) * max(2.0, SECOND_S / first_s)))]
            second = read(loaded.model, more)
            seconds = []
            for _ in range(STEPS):
                begin = time.perf_counter()
                int(step(loaded.model, second.first, second.cache))
                seconds.append(time.perf_counter() - begin)
            step_s = statistics.median(seconds)
        rates = rates_of(cost, (len(ids), first_s), (len(more), second.seconds))
        step_bytes = cost.weight_bytes() + cost.cache_bytes(len(more))
        return cls(cost, start_s, *rates, step_s / step_bytes)

    def full(self, length: int) -> Work:
        """Return the work of full attention."""
        return Work(_attention(self.cost, length), self.cost.cache_bytes(length))

    def window(self, entries: int, length: int) -> Work:
        """Return the work of a window, first tokens included."""
        windows = (entries,) * self.cost.num_layers
        sliding = replace(self.cost, num_layers=0, windows=(*windows, *self.cost.windows))
        return Work(_attention(sliding, length), sliding.cache_bytes(length))

    def settings(self, config: CCAConfig, length: int, device: str) -> Work:
        """Return the work of CCA, or of fetch, which is full attention's for short prompts."""
        if length <= reading_of(config, device, True).full_until:
            return self.full(length)
        cost = self.cost
        sinks = num_sinks(config.sink_size, config.group_size)
        attention = _attention(cost, length, config.group_size, config.window_size, sinks)
        fetch = fetch_flops(config, length, cost.query_heads, cost.head_dim)
        held = cost.config_bytes(config, length).device
        return Work(attention + cost.num_layers * fetch, held)

    def seconds(self, work: Work, prompts: int, length: int) -> float:
        """Estimate how long a method takes to read prompts, to tell their perplexity and to answer
        them."""
        cost = self.cost
        reading = self.weights_s * _weights(cost, length) + self.attention_s * work.attention
        readings = max(prompts, min(PREFILLS, int(PREFILL_BUDGET_S / reading)))
        perplexity = self.weights_s * 2 * cost.head_weights * length
        steps = DECODE_STEPS + DECODE_WARM_UP + prompts * ANSWER_STEPS
        answers = steps * self.byte_s * (cost.weight_bytes() + work.cache_bytes)
        return self.start_s + readings * reading + prompts * perplexity + answers


def rates_of(
    cost: ModelCost, first: tuple[int, float], second: tuple[int, float]
) -> tuple[float, float]:
    """Return seconds for an operation with the layers' weights and for another one, from the tokens
    and seconds of two readings; the second kind takes at most as long as the first."""
    ratio = second[0] / first[0]
    more = _attention(cost, second[0]) - ratio * _attention(cost, first[0])
    attention_s = max(0.0, (second[1] - ratio * first[1]) / more) if more > 0 else 0.0
    attention_s = min(attention_s, second[1] / cost.prefill_flops(second[0]))
    rest = second[1] - attention_s * _attention(cost, second[0])
    return rest / _weights(cost, second[0]), attention_s


def _weights(cost: ModelCost, length: int) -> float:
    """Count operations with the layers' weights."""
    return 2.0 * cost.linear_weights * length


def _attention(cost: ModelCost, length: int, *sizes: int) -> float:
    """Count the other operations of a prompt; sizes are g, s and first tokens."""
    return cost.prefill_flops(length, *sizes) - _weights(cost, length)
