"""Measure one method of the demo on a chat model: numbers hidden in prompts of its template."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corecontext.data.needles import ANSWER_TOKENS, SENTENCE, make_needles
from corecontext.data.retrieval import Fact
from corecontext.demo.task import Question
from corecontext.integrations.hf.cache_layers import cache_bytes, host_bytes
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.loading import Loaded
from corecontext.measure import PeakMemory, synchronize
from corecontext.perplexity import hidden_nll

ASKED = "What is the special magic number?"


@dataclass(frozen=True)
class ChatTask:
    """Prompts of about equal length, the same for every method."""

    questions: list[Question]

    @property
    def token_ids(self) -> list[int]:
        """The first prompt."""
        return self.questions[0].token_ids


def make_chat_task(tokenizer: Any, document: str, count: int, length: int) -> ChatTask:
    """Hide a number in pieces of a document, at `count` even depths, in prompts of at most `length`
    tokens of the model's chat template."""
    tokens = len(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"])
    questions = []
    for needle in make_needles(document, tokenizer, min(length, tokens), count, seed=0):
        fact = Fact("passkey", SENTENCE.format(number=needle.number), ASKED, needle.number)
        distance = round((1 - needle.depth) * len(needle.ids))
        questions.append(
            Question(fact, needle.depth, distance, needle.ids, ANSWER_TOKENS, in_chat=True)
        )
    return ChatTask(questions)


def run_chat(loaded: Loaded, task: ChatTask, advance: Callable[[float], Any]) -> dict[str, Any]:
    """Measure a method on the prompts: each is read and answered, and gives a sample of every
    quantity."""
    model = loaded.model
    device = str(model.device)
    first_s = []
    next_ms = []
    losses = []
    peaks = []
    answers = []
    sizes: dict[str, int] = {}
    with torch.inference_mode():
        # Loading code and starting threads are no cost of the method: warm up.
        model(torch.tensor([task.token_ids[:64]], device=device), use_cache=True)
        for question in task.questions:
            ids = torch.tensor([question.token_ids], device=device)
            peak = PeakMemory(device)
            synchronize(device)
            start = time.perf_counter()
            out = model.get_decoder()(ids, use_cache=True)
            token = model.get_output_embeddings()(out.last_hidden_state[:, -1:]).argmax(-1)
            synchronize(device)
            first_s.append(time.perf_counter() - start)
            peaks.append(peak.read())
            nll = hidden_nll(model, out.last_hidden_state, ids)
            losses.append(float(nll[nll.shape[0] // 2 :].double().mean()))
            cache = returned_cache(out)
            sizes = {"cache_bytes": cache_bytes(cache), "host_bytes": host_bytes(cache)}
            answer, times = _answer(loaded, cache, token)
            answers.append(answer)
            next_ms += times
            advance(1 / len(task.questions))
    return {
        "tokens": len(task.questions[-1].token_ids),  # whose cache is counted
        "first_token_s": first_s,
        "next_token_ms": next_ms,
        **sizes,
        "peak_bytes": max(peaks),
        "perplexity": math.exp(sum(losses) / len(losses)),
        "answers": answers,
        "sizes": loaded.sizes(),
    }


def _answer(loaded: Loaded, cache: Any, token: Tensor) -> tuple[str, list[float]]:
    """Continue an answer greedily to the end of its line or message; also the milliseconds of each
    token after the first."""
    model = loaded.model
    tokenizer = loaded.tokenizer
    device = str(model.device)
    answer = [int(token)]
    times = []
    while len(answer) < ANSWER_TOKENS and not _ends(tokenizer, answer[-1]):
        start = time.perf_counter()
        token = model(token, **with_cache(cache), use_cache=True).logits[:, -1:].argmax(-1)
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
        answer.append(int(token))
    return tokenizer.decode(answer, skip_special_tokens=True).strip(), times


def _ends(tokenizer: Any, token: int) -> bool:
    """Whether a token ends an answer."""
    return token == tokenizer.eos_token_id or "\n" in tokenizer.decode([token])
