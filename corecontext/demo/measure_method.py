"""Measure one method of the demo, in a process of its own so that the peak memory is its alone.

One prefill serves all: its last token gives the first new token, its hidden states the perplexity,
its cache the answers. The parent starts `python -m corecontext.demo.measure_method`, pickles the
model, the options and the task to standard input, and reads JSON lines from standard output:
{"advance": fraction of the work just done}, and at the end {"result": ...} or {"error": one line}.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from corecontext.demo.needle_prompts import ChatTask, run_chat
from corecontext.demo.task import Question, Task
from corecontext.files import UserError, is_out_of_memory
from corecontext.integrations.hf.adapter import add_adapter
from corecontext.integrations.hf.cache_layers import cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.loading import Loaded, load
from corecontext.measure import PeakMemory, synchronize
from corecontext.perplexity import hidden_nll

SHARES = {"prefill": 0.6, "perplexity": 0.05, "decode": 0.1, "questions": 0.25}
"""Of the progress bar."""
PREFILL_REPEATS = 3
PREFILL_BUDGET_S = 12.0
"""The prefill is repeated only while its repetitions fit into this time."""
DECODE_STEPS = 32
DECODE_WARM_UP = 4


def run_method(loaded: Loaded, task: Task, advance: Callable[[float], Any]) -> dict[str, Any]:
    """Measure a method on the task."""
    model = loaded.model
    device = str(model.device)
    input_ids = torch.tensor([task.token_ids], device=device)
    layers = model.get_decoder().layers
    with torch.inference_mode():
        # Loading code and starting threads are no cost of the method: warm up.
        warm_up = 64
        if loaded.config is not None:
            warm_up = loaded.config.window_size + 4 * loaded.config.group_size
        model(input_ids[:, :warm_up], use_cache=True, logits_to_keep=1)

        # The prefill of which memory is measured; each layer moves the progress bar.
        hooks = [
            layer.register_forward_hook(lambda *_: advance(SHARES["prefill"] / len(layers)))
            for layer in layers
        ]
        peak = PeakMemory(device)
        seconds, hidden, cache, first = _prefill(model, input_ids, device)
        peak_bytes = peak.read()
        for hook in hooks:
            hook.remove()

        nll = hidden_nll(model, hidden, input_ids)
        advance(SHARES["perplexity"])
        del hidden

        # Times: further prefills, and steps from a copy of the cache.
        samples = [seconds]
        while len(samples) < PREFILL_REPEATS and sum(samples) + seconds <= PREFILL_BUDGET_S:
            samples.append(_prefill(model, input_ids, device)[0])
        next_ms = _decode_times(model, copy.deepcopy(cache), first, device)
        advance(SHARES["decode"])

        answers = []
        for question in task.questions:
            answers.append(_answer(loaded, copy.deepcopy(cache), question))
            advance(SHARES["questions"] / len(task.questions))
    keep = torch.tensor(task.document_mask[1:])
    return {
        "tokens": len(task.token_ids),
        "first_token_s": samples,
        "next_token_ms": next_ms,
        "cache_bytes": cache_bytes(cache),
        "peak_bytes": peak_bytes,
        "perplexity": float(nll[keep].double().mean().exp()),
        "answers": answers,
        "sizes": loaded.sizes(),
    }


def _prefill(model: Any, input_ids: Tensor, device: str) -> tuple[float, Tensor, Any, Tensor]:
    """Return seconds to the first token, last hidden states [1, L, C], the cache and the first
    token [1, 1]."""
    synchronize(device)
    start = time.perf_counter()
    out = model.get_decoder()(input_ids, use_cache=True)
    first = model.get_output_embeddings()(out.last_hidden_state[:, -1:]).argmax(-1)
    synchronize(device)
    return time.perf_counter() - start, out.last_hidden_state, returned_cache(out), first


def _decode_times(model: Any, cache: Any, token: Tensor, device: str) -> list[float]:
    """Return milliseconds of each further token, greedily."""
    samples = []
    for _ in range(DECODE_WARM_UP + DECODE_STEPS):
        synchronize(device)
        start = time.perf_counter()
        token = model(token, **with_cache(cache), use_cache=True).logits[:, -1:].argmax(-1)
        synchronize(device)
        samples.append(1e3 * (time.perf_counter() - start))
    return samples[DECODE_WARM_UP:]


def _answer(loaded: Loaded, cache: Any, question: Question) -> str:
    """Continue the document by a question, and generate greedily to the end of the answer."""
    model = loaded.model
    tokenizer = loaded.tokenizer
    tokens = torch.tensor([question.token_ids], device=model.device)
    answer: list[int] = []
    for _ in range(question.max_new_tokens):
        out = model(tokens, **with_cache(cache), use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1:].argmax(-1)
        answer.append(int(tokens))
        if _ends(tokenizer, answer[-1]):
            break
    return tokenizer.decode(answer, skip_special_tokens=True).strip()


def _ends(tokenizer: Any, token: int) -> bool:
    """Whether a token ends an answer: the text, or the answer's sentence or line."""
    text = tokenizer.decode([token])
    return token == tokenizer.eos_token_id or "." in text or "\n" in text


def main() -> int:
    """Read the order from standard input, measure and write the result."""

    def send(**message: Any) -> None:
        print(json.dumps(message), flush=True)

    model, options, task = pickle.load(sys.stdin.buffer)
    adapter = options.pop("adapter", None)
    measure: Any = run_chat if isinstance(task, ChatTask) else run_method
    try:
        loaded = load(model, **options)
        if adapter is not None:
            add_adapter(loaded.model, adapter)
        send(result=measure(loaded, task, lambda amount: send(advance=amount)))
    except UserError as error:
        send(error=str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        send(error="out of memory. Use --max-tokens with a smaller number.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
