"""Everything the demo measures for one method, in a process of its own, so that the peak memory is
this method's alone.

One prefill serves all: its last token gives the first new token, its hidden states the perplexity,
its cache the answers. The parent process starts `python -m corecontext.demo.measure_method SETTINGS`
and reads JSON lines from standard output: {"advance": fraction of the work just done}, and at the
end {"result": ...} or {"error": one line}.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from corecontext.demo.task import Task
from corecontext.files import UserError
from corecontext.integrations.hf_cache import cache_bytes
from corecontext.loading import Loaded, is_out_of_memory, load
from corecontext.measure import PeakMemory, synchronize
from corecontext.perplexity import hidden_nll

SHARES = {
    "prefill": 0.6,
    "perplexity": 0.05,
    "decode": 0.1,
    "questions": 0.25,
}  # of the progress bar
PREFILL_BUDGET_S = (
    12.0  # repeat the prefill up to PREFILL_REPEATS times while it has taken less than this
)
PREFILL_REPEATS = 3
DECODE_STEPS, DECODE_WARM_UP = 32, 4


@dataclass(frozen=True)
class MethodResult:
    """What was measured for one method."""

    method: str
    tokens: int
    first_token_s: list[float]
    next_token_ms: list[float]
    cache_bytes: int
    peak_bytes: int
    perplexity: float
    answers: list[str]
    sizes: dict[str, Any]


def run_method(loaded: Loaded, task: Task, advance: Callable[[float], Any]) -> MethodResult:
    """Prefill once (again only for the timing), then read everything off it."""
    model, tokenizer = loaded.model, loaded.tokenizer
    device = str(model.device)
    input_ids = torch.tensor([task.token_ids], device=device)
    layers = model.get_decoder().layers
    with torch.inference_mode():
        # The warm-up loads code and starts threads: no cost of the method.
        warm_up = (
            64
            if loaded.config is None
            else loaded.config.window_size + 4 * loaded.config.group_size
        )
        model(input_ids[:, :warm_up], use_cache=True, logits_to_keep=1)
        hooks = [
            layer.register_forward_hook(lambda *_: advance(SHARES["prefill"] / len(layers)))
            for layer in layers
        ]
        peak = PeakMemory(device)
        seconds, hidden, cache, first = _prefill(model, input_ids, device)
        peak_bytes = peak.read()
        for hook in hooks:
            hook.remove()
        nll = hidden_nll(model.get_output_embeddings(), hidden, input_ids)
        advance(SHARES["perplexity"])
        del hidden
        samples = [seconds]
        while len(samples) < PREFILL_REPEATS and sum(samples) + seconds <= PREFILL_BUDGET_S:
            samples.append(_prefill(model, input_ids, device)[0])
        next_ms = _decode_times(model, copy.deepcopy(cache), first, device)
        advance(SHARES["decode"])
        answers = []
        for question in task.questions:
            answers.append(
                _answer(
                    model,
                    tokenizer,
                    copy.deepcopy(cache),
                    question.token_ids,
                    question.max_new_tokens,
                )
            )
            advance(SHARES["questions"] / len(task.questions))
    keep = torch.tensor(task.document_mask[1:])
    method = "full" if loaded.config is None else "cca"
    return MethodResult(
        method,
        len(task.token_ids),
        samples,
        next_ms,
        cache_bytes(cache),
        peak_bytes,
        float(nll[keep].double().mean().exp()),
        answers,
        loaded.sizes(),
    )


def _prefill(model: Any, input_ids: Tensor, device: str) -> tuple[float, Tensor, Any, Tensor]:
    """Seconds to the first token; last hidden states [1, L, C]; the cache; the first token [1,
    1]."""
    synchronize(device)
    start = time.perf_counter()
    out = model.get_decoder()(input_ids, use_cache=True)
    first = model.get_output_embeddings()(out.last_hidden_state[:, -1:]).argmax(-1)
    synchronize(device)
    return time.perf_counter() - start, out.last_hidden_state, out.past_key_values, first


def _decode_times(model: Any, cache: Any, token: Tensor, device: str) -> list[float]:
    """Milliseconds of each further token, greedily."""
    samples = []
    for _ in range(DECODE_WARM_UP + DECODE_STEPS):
        synchronize(device)
        start = time.perf_counter()
        token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        synchronize(device)
        samples.append(1e3 * (time.perf_counter() - start))
    return samples[DECODE_WARM_UP:]


def _answer(
    model: Any, tokenizer: Any, cache: Any, question_ids: list[int], max_new_tokens: int
) -> str:
    """Continue the document by a question and read on greedily, to the end of the answer."""
    tokens = torch.tensor([question_ids], device=model.device)
    made: list[int] = []
    for _ in range(max_new_tokens):
        tokens = (
            model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            .logits[:, -1:]
            .argmax(-1)
        )
        made.append(int(tokens))
        if made[-1] == tokenizer.eos_token_id or {".", "\n"} & set(tokenizer.decode(made[-1:])):
            break
    return tokenizer.decode(made, skip_special_tokens=True).strip()


def main() -> int:
    """The child process."""

    def say(**message: Any) -> None:
        print(json.dumps(message), flush=True)

    settings = json.load(sys.stdin)
    try:
        loaded = load(
            settings["model"],
            method=settings["method"],
            group_size=settings["group_size"],
            window_size=settings["window_size"],
            dtype=settings["dtype"],
            device=settings["device"],
        )
        task = Task.from_json(settings["task"])
        say(result=dataclasses.asdict(run_method(loaded, task, lambda amount: say(advance=amount))))
    except UserError as error:
        say(error=str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say(error="out of memory. Use --max-tokens with a smaller number.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
