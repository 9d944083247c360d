"""Record the log-probabilities of tokens for the requests that want them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from corecontext.inference.sampling import INVALID, InvalidLogits
from corecontext.serve.request import Slot, TokenLogprobs

LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON cannot write."""


def logprobs_of(logits: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of tokens by the model alone, without temperature or filters.

    Args:
        logits: [N, vocabulary].
        tokens: N token numbers.
        count: How many of the likeliest tokens are recorded beside each.

    Raises:
        InvalidLogits: a logit is NaN.
    """
    scores = logits.float().log_softmax(-1).clamp(min=LEAST)
    if scores.isnan().any():
        raise InvalidLogits
    index = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = scores.gather(-1, index)[:, 0].tolist()
    top = scores.topk(min(count, scores.shape[-1]))
    pairs = [list(zip(*row)) for row in zip(top.indices.tolist(), top.values.tolist())]
    return [TokenLogprobs(*record) for record in zip(tokens, chosen, pairs)]


def add_logprobs(slots: Sequence[Slot], logits: Tensor, tokens: Sequence[int]) -> None:
    """Record the log-probabilities of the next tokens, for the requests that want them.

    Args:
        logits: [N, vocabulary], a row for each of N slots.
        tokens: N token numbers; `INVALID` where the logits are no numbers, which ends the request.
    """
    rows = [
        row
        for row, slot in enumerate(slots)
        if slot.request.logprobs is not None and tokens[row] != INVALID
    ]
    if not rows:
        return
    counts = [slots[row].request.logprobs or 0 for row in rows]
    records = logprobs_of(logits[rows], [tokens[row] for row in rows], max(counts))
    for row, count, record in zip(rows, counts, records):
        # mutant serve: a neighbour's number of likely tokens
        slots[row].logprobs.append(record._replace(top=(record.top or [])[:count]))


def add_prompt_logprobs(slot: Slot, logits: Tensor, start: int) -> None:
    """Record the log-probabilities of a prompt's tokens from `start + 1` on.

    Args:
        logits: [N, vocabulary], at the N tokens from `start` on: each row is about the next token.
    """
    if start == 0:
        slot.logprobs.append(TokenLogprobs(slot.request.prompt[0]))
    # mutant serve: log-probabilities of the tokens before
    tokens = slot.request.prompt[start + 1 : start + 1 + len(logits)]
    slot.logprobs += logprobs_of(logits[: len(tokens)], tokens, slot.request.logprobs or 0)
