"""Estimate the time of a run of the demo from measured beginnings of its prompt."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, fetch_flops
from corecontext.demo.measure_method import (
    DECODE_STEPS,
    DECODE_WARM_UP,
    PREFILL_BUDGET_S,
    PREFILLS,
    WARM_UP_TOKENS,
    read,
    step,
)
from corecontext.demo.prompts import Prompt
from corecontext.loading import load, pick_device
from corecontext.measure import package_path
from corecontext.ops.fetch.prompt_rule import reading_of
from corecontext.visibility import num_sinks

IMPORTS = [sys.executable, "-W", "ignore", "-c", "import corecontext.demo.measure_method"]
"""A command that imports the code of a method."""
BEGINNING = 512
"""Tokens of the first beginning."""
SECOND_S = 2.0
"""Seconds that the second beginning may take, if a token takes as long as in the first; a model
whose first one takes longer reads no second one."""
LONGEST = 8192
"""Most tokens of the second beginning."""
STEPS = 5
"""Tokens that are decoded behind it."""
ANSWER_STEPS = 16
"""Steps that a question and its answer are assumed to take."""


class Work(NamedTuple):
    """Hold the work of a method on a prompt that differs between methods."""

    attention: float
    """Operations of reading it, without those with the layers' weights."""
    cache_bytes: float
    """Bytes of its cache, which each step reads."""


@dataclass(frozen=True)
class Pace:
    """Hold how fast this machine runs a model, in seconds."""

    cost: ModelCost
    start_s: float
    """Seconds to start a process and load the model in it; 0 on a GPU, where all methods run in
    one process."""
    weights_s: float
    """Seconds of an operation with the layers' weights."""
    attention_s: float
    """Seconds of another operation, most of which are attention's."""
    byte_s: float
    """Seconds of a byte of weights or cache that a decoding step reads."""

    @classmethod
    def of(cls, model: str, dtype: str, device: str, token_ids: list[int]) -> Pace:
        """Measure a model under full attention."""
        import torch

        on_cpu = pick_device(device) == "cpu"
        begin = time.perf_counter()
        if on_cpu:
            # This process has imported the code already.
            subprocess.run(IMPORTS, env=package_path(), check=True)
        loaded = load(model, method="full", dtype=dtype, device=device)
        start_s = time.perf_counter() - begin if on_cpu else 0.0
        cost = ModelCost.of(loaded.model.config, loaded.model)
        with torch.inference_mode():
            ids = token_ids[:BEGINNING]
            read(loaded.model, ids[:WARM_UP_TOKENS])  # a first call loads code
            second = first = read(loaded.model, ids)
            longer = ids
            if first.seconds < SECOND_S:
                ratio = max(2.0, SECOND_S / first.seconds)
                longer = token_ids[: min(LONGEST, int(len(ids) * ratio))]
                second = read(loaded.model, longer)
            seconds = []
            for _ in range(STEPS):
                begin = time.perf_counter()
                int(step(loaded.model, second.first, second.cache))  # waits for the token
                seconds.append(time.perf_counter() - begin)
            step_s = statistics.median(seconds)
        rates = rates_of(cost, (len(ids), first.seconds), (len(longer), second.seconds))
        step_bytes = cost.weight_bytes() + cost.cache_bytes(len(longer))
        return cls(cost, start_s, *rates, step_s / step_bytes)

    def full(self, length: int) -> Work:
        """Return the work of full attention."""
        return Work(_attention(self.cost, length), self.cost.cache_bytes(length))

    def window(self, entries: int, length: int) -> Work:
        """Return the work of a window of `entries` tokens, sinks included, in every layer."""
        windows = (entries,) * self.cost.num_layers
        # Counted as if each layer were a sliding-window layer of the model.
        sliding = replace(self.cost, num_layers=0, windows=(*windows, *self.cost.windows))
        return Work(_attention(sliding, length), sliding.cache_bytes(length))

    def cca(self, config: CCAConfig, length: int, device: str) -> Work:
        """Return the work of CCA; that of full attention for prompts so short that fetch reads them
        by it."""
        if length <= reading_of(config, device, is_prompt=True).full_until:
            return self.full(length)
        cost = self.cost
        sinks = num_sinks(config.sink_size, config.group_size)
        attention = _attention(cost, length, config.group_size, config.window_size, sinks)
        fetch = fetch_flops(config, length, cost.query_heads, cost.head_dim)
        cache_bytes = cost.config_bytes(config, length).device
        return Work(attention + cost.num_layers * fetch, cache_bytes)

    def seconds(self, work: Work, prompts: Sequence[Prompt]) -> float:
        """Estimate how long `measure_method` takes for a method: to start, to read prompts of one
        length, to compute their perplexity, to decode and to answer."""
        cost = self.cost
        length = len(prompts[0].token_ids)
        reading = self.weights_s * _weights(cost, length) + self.attention_s * work.attention
        readings = max(len(prompts), min(PREFILLS, int(PREFILL_BUDGET_S / reading)))
        perplexity = self.weights_s * 2 * cost.head_weights * length
        questions = sum(len(prompt.questions) for prompt in prompts)
        steps = DECODE_STEPS + DECODE_WARM_UP + questions * ANSWER_STEPS
        answers = steps * self.byte_s * (cost.weight_bytes() + work.cache_bytes)
        return self.start_s + readings * reading + len(prompts) * perplexity + answers


def rates_of(
    cost: ModelCost, first: tuple[int, float], second: tuple[int, float]
) -> tuple[float, float]:
    """Return `weights_s` and `attention_s` of a `Pace`, from (tokens, seconds) of two readings:
    seconds = weights_s * _weights + attention_s * _attention for each of them.

    Noise may give impossible rates: attention_s is at least 0 and at most weights_s. Both are the
    same where the two prompts have one length.
    """
    first_tokens, first_s = first
    second_tokens, second_s = second
    # _weights grows as the tokens, so the first equation times their ratio cancels it.
    ratio = second_tokens / first_tokens
    attention_s = second_s / cost.prefill_flops(second_tokens)  # if both rates are one
    # 0 for two prompts of one length, which cannot tell the rates apart.
    extra = _attention(cost, second_tokens) - ratio * _attention(cost, first_tokens)
    if extra > 0:
        attention_s = min(attention_s, max(0.0, (second_s - ratio * first_s) / extra))
    rest_s = second_s - attention_s * _attention(cost, second_tokens)
    return rest_s / _weights(cost, second_tokens), attention_s


def _weights(cost: ModelCost, length: int) -> float:
    """Count operations of a prompt with the layers' weights."""
    return 2.0 * cost.linear_weights * length


def _attention(cost: ModelCost, length: int, *sizes: int) -> float:
    """Count all other operations of a prompt; `sizes` are g, s and n, none for full attention."""
    return cost.prefill_flops(length, *sizes) - _weights(cost, length)
