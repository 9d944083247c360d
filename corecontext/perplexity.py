"""Perplexity of a whole document in one causal pass, chunk by chunk, so that memory stays
bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from corecontext.record import Record, make_record
from corecontext.terminal import console


@dataclass(frozen=True)
class Perplexity:
    """Negative log-likelihoods of a document's tokens, given all tokens before them."""

    nll: Tensor
    """[L - 1], nats, float32, on the CPU; entry t is that of token t + 1."""
    num_bytes: int
    """UTF-8 bytes of the document."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Of the model and its attention, for records."""

    @property
    def value(self) -> float:
        """exp of the mean over tokens."""
        return math.exp(self.nll.double().mean())

    @property
    def bits_per_byte(self) -> float:
        """Bits needed for the document's tokens, per byte of it: comparable between tokenizers."""
        return float(self.nll.double().sum()) / math.log(2) / self.num_bytes

    def by_position(self, first: int = 512) -> list[tuple[int, int, float]]:
        """Perplexity of tokens at positions first_of_bucket .. end - 1; each bucket is twice as
        long as the last."""
        buckets, start, end, length = [], 0, first, len(self.nll) + 1
        while start < length:
            part = self.nll[max(0, start - 1) : min(end, length) - 1]
            if len(part):
                buckets.append((start, min(end, length), math.exp(part.double().mean())))
            start, end = end, 2 * end
        return buckets


def to_records(found: Mapping[str, Perplexity], model: str) -> list[Record]:
    """quality.* records of each method: the whole document and each bucket of positions."""
    records = []
    for method, one in found.items():
        params = {
            "method": method,
            "model": Path(model).name,
            "task": "document",
            "length": len(one.nll) + 1,
            **one.sizes,
        }
        records.append(make_record("quality.perplexity", one.value, params))
        records.append(make_record("quality.bits_per_byte", one.bits_per_byte, params))
        records += [
            make_record("quality.perplexity", value, {**params, "bucket": f"{start}-{end - 1}"})
            for start, end, value in one.by_position()
        ]
    return records


def print_table(found: Mapping[str, Perplexity]) -> None:
    """Perplexity by position, one column per method."""
    first = next(iter(found.values()))
    table = Table(
        title=f"perplexity of {len(first.nll) + 1} tokens, {first.num_bytes} bytes", box=SIMPLE_HEAD
    )
    table.add_column("positions")
    for method in found:
        table.add_column(
            {"full": "full attention", "cca": "CCA"}.get(method, method), justify="right"
        )
    for i, (start, end, _) in enumerate(first.by_position()):
        table.add_row(
            f"{start} - {end - 1}", *(f"{one.by_position()[i][2]:.4f}" for one in found.values())
        )
    table.add_section()
    table.add_row("all", *(f"{one.value:.4f}" for one in found.values()))
    table.add_row("bits per byte", *(f"{one.bits_per_byte:.4f}" for one in found.values()))
    console().print(table)


def document_nll(
    model: Any,
    input_ids: Tensor,
    *,
    chunk_size: int = 1024,
    on_chunk: Callable[[int], Any] = lambda tokens: None,
) -> Tensor:
    """Negative log-likelihood of every token but the first.

    The cache carries the past from chunk to chunk, so each token sees all before it (under CCA: as
    core tokens and the window), exactly as in one pass over the document.

    Args:
        model: A Hugging Face causal language model, CCA enabled or not.
        input_ids: [1, L], L >= 2.
        chunk_size: Tokens per forward pass; logits of so many tokens are held at once.
        on_chunk: Called with the number of tokens done after each chunk.

    Returns:
        [L - 1], nats, float32, on the CPU.
    """
    cache, parts, length = None, [], input_ids.shape[1]
    with torch.inference_mode():
        for start in range(0, length, chunk_size):
            chunk = input_ids[:, start : start + chunk_size]
            out = model(chunk, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            targets = input_ids[0, start + 1 : start + 1 + chunk.shape[1]]
            parts.append(
                F.cross_entropy(
                    out.logits[0, : len(targets)].float(), targets, reduction="none"
                ).cpu()
            )
            on_chunk(chunk.shape[1])
    return torch.cat(parts)


def hidden_nll(head: Any, hidden: Tensor, input_ids: Tensor, *, chunk_size: int = 1024) -> Tensor:
    """The same from a prefill's last hidden states [1, L, C]; logits of only chunk_size tokens
    exist at once."""
    parts = []
    with torch.inference_mode():
        for start in range(0, input_ids.shape[1] - 1, chunk_size):
            targets = input_ids[0, start + 1 : start + 1 + chunk_size]
            logits = head(hidden[0, start : start + len(targets)]).float()
            parts.append(F.cross_entropy(logits, targets, reduction="none").cpu())
    return torch.cat(parts)
