"""Measure one method of the demo: one reading of a prompt gives its first token, peak memory and
perplexity, and the cache from which further tokens are timed and questions answered.

On a CPU `compare` runs this file as a process for each method, so that the peak memory is the
method's own: it reads the pickled arguments of `measure_method` from standard input and writes
the pickled outcome, a result or a UserError, to standard output.
"""

import copy
import math
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from corecontext.demo.prompts import Prompt, Question
from corecontext.files import UserError, first_line, is_out_of_memory
from corecontext.integrations.hf.adapter import add_adapter
from corecontext.integrations.hf.cache_layers import cache_bytes, host_bytes, make_compact
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.loading import Loaded, load
from corecontext.measure import PeakMemory, synchronize
from corecontext.perplexity import hidden_nll
from corecontext.terminal import Advance, progress

WARM_UP_TOKENS = 64
"""Tokens that methods without core tokens read before anything is measured."""
PREFILLS = 3
"""Samples of the time to the first token, where the time allows."""
PREFILL_BUDGET_S = 6.0
"""Seconds into which all readings must fit for the last prompt to be read again."""
DECODE_STEPS = 32
"""Further tokens that are timed."""
DECODE_WARM_UP = 4
"""Further tokens before these, untimed."""


class Reading(NamedTuple):
    """Hold the results of reading a prompt."""

    seconds: float
    """To the first new token."""
    hidden: Tensor
    """Last hidden states [1, L, hidden size]."""
    cache: Cache
    first: Tensor
    """The first new token [1, 1]."""


def measure_method(
    title: str, model: str, options: Mapping[str, Any], prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Load a model under a method and measure it, with progress on the terminal.

    Args:
        title: The method's, for the progress.
        model: The model's folder or name.
        options: For `load`; besides, "adapter" names an adapter of the package.

    Returns:
        As `measure`.

    Raises:
        UserError: the model cannot be loaded, or memory ran out.
    """
    for_load = dict(options)
    adapter = for_load.pop("adapter", None)
    tokens = len(prompts[-1].token_ids)
    try:
        loaded = load(model, warn=False, **for_load)
        if adapter is not None:
            add_adapter(loaded.model, adapter)
        with progress(f"{title}, {tokens} tokens", len(prompts)) as advance, torch.inference_mode():
            return measure(loaded, prompts, advance)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError("out of memory. Use --max-tokens with a smaller number.") from None


def measure(loaded: Loaded, prompts: Sequence[Prompt], advance: Advance) -> dict[str, Any]:
    """Measure a method on prompts: each gives a sample of every quantity, the last one the size of
    the cache and the times of further tokens.

    Returns:
        By the names of records: samples of "first_token_s" and "next_token_ms", then
        "cache_bytes", "host_bytes", the largest "peak_bytes" and the mean "perplexity". Besides:
        "tokens" of the last prompt, "answers" of all questions in order, "sizes" of the model.
    """
    model = loaded.model
    layers = model.get_decoder().layers
    # Loading code and starting threads are no cost of the method: warm up, with a few groups too.
    warm_up = WARM_UP_TOKENS
    if loaded.config is not None:
        warm_up = loaded.config.window_size + 4 * loaded.config.group_size
    read(model, prompts[0].token_ids[:warm_up])

    # Read and answer each prompt; each layer moves the progress bar.
    seconds = []
    peaks = []
    losses = []
    answers = []
    for prompt in prompts:
        hooks = [
            layer.register_forward_hook(lambda *_: advance(1 / len(layers))) for layer in layers
        ]
        peak = PeakMemory(str(model.device))
        reading = read(model, prompt.token_ids)
        peaks.append(peak.read())
        for hook in hooks:
            hook.remove()
        seconds.append(reading.seconds)
        nll = hidden_nll(model, reading.hidden, torch.tensor([prompt.token_ids]).to(model.device))
        losses.append(float(nll[torch.tensor(prompt.is_counted[1:])].double().mean()))
        for question in prompt.questions:
            answers.append(_answer(loaded, reading, question))

    # Time further prefills, and steps from a copy of the cache.
    length = len(prompts[-1].token_ids)
    while len(seconds) < PREFILLS and sum(seconds) + seconds[-1] <= PREFILL_BUDGET_S:
        seconds.append(read(model, prompts[-1].token_ids).seconds)
    step_times = _step_times(model, reading)
    cache = reading.cache
    make_compact(cache)
    return {
        "tokens": length,
        "first_token_s": seconds,
        "next_token_ms": step_times,
        "cache_bytes": cache_bytes(cache),
        "host_bytes": host_bytes(cache),
        "peak_bytes": max(peaks),
        "perplexity": math.exp(sum(losses) / len(losses)),
        "answers": answers,
        "sizes": loaded.sizes(),
    }


def read(model: Any, token_ids: list[int]) -> Reading:
    """Read a prompt, and time it."""
    device = str(model.device)
    input_ids = torch.tensor([token_ids], device=device)
    synchronize(device)
    start = time.perf_counter()
    out = model.get_decoder()(input_ids, use_cache=True)
    first = model.get_output_embeddings()(out.last_hidden_state[:, -1:]).argmax(-1)
    synchronize(device)
    seconds = time.perf_counter() - start
    return Reading(seconds, out.last_hidden_state, returned_cache(out), first)


def step(model: Any, tokens: Tensor, cache: Cache) -> Tensor:
    """Append tokens to a cache; return the likeliest next one [1, 1]."""
    out = model(tokens, **with_cache(cache), use_cache=True, logits_to_keep=1)
    return out.logits[:, -1:].argmax(-1)


def _step_times(model: Any, reading: Reading) -> list[float]:
    """Return the milliseconds of each further token, decoded greedily on a copy of the cache."""
    device = str(model.device)
    cache = copy.deepcopy(reading.cache)
    token = reading.first
    samples = []
    for _ in range(DECODE_WARM_UP + DECODE_STEPS):
        synchronize(device)
        start = time.perf_counter()
        token = step(model, token, cache)
        synchronize(device)
        samples.append(1e3 * (time.perf_counter() - start))
    return samples[DECODE_WARM_UP:]


def _answer(loaded: Loaded, reading: Reading, question: Question) -> str:
    """Answer a question about a prompt greedily on a copy of the cache, to the end of the answer's
    line or message."""
    tokenizer = loaded.tokenizer
    cache = copy.deepcopy(reading.cache)
    token = reading.first
    if question.token_ids:
        tokens = torch.tensor([question.token_ids], device=token.device)
        token = step(loaded.model, tokens, cache)
    answer = [int(token)]
    # mutant demo: an answer has a token too many
    while len(answer) < question.max_new_tokens and not _ends(tokenizer, answer[-1]):
        token = step(loaded.model, token, cache)
        answer.append(int(token))
    return tokenizer.decode(answer, skip_special_tokens=True).strip()


def _ends(tokenizer: Any, token: int) -> bool:
    """Whether a token ends an answer."""
    return token == tokenizer.eos_token_id or "\n" in tokenizer.decode([token])


def main() -> int:
    """Read the arguments from standard input and write the outcome to standard output."""
    outcome: dict[str, Any] | UserError
    try:
        outcome = measure_method(*pickle.load(sys.stdin.buffer))
    except UserError as error:
        outcome = error
    except NotImplementedError as error:  # as at the command line
        outcome = UserError(first_line(error))
    except KeyboardInterrupt:  # Ctrl-C reaches the parent too, which reports it
        return 130
    pickle.dump(outcome, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
