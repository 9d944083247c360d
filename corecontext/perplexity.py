"""Measure the perplexity of a whole document, chunk by chunk in bounded memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from corecontext.config import CCAConfig
from corecontext.files import UserError, one_line
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.integrations.hf.enabling import scored
from corecontext.integrations.hf.logits_head import head_logits
from corecontext.integrations.hf.rotation import rotation_of
from corecontext.loading import WHOLE, Loaded, encode
from corecontext.record import Record, make_record
from corecontext.terminal import console, progress


@dataclass(frozen=True)
class Perplexity:
    """Hold the negative log-likelihoods of a document's tokens, given all tokens before them."""

    nll: Tensor
    """[L - 1], nats, float32, on the CPU; `nll[t]` is that of token t + 1, the first predicted one
    being token 1."""
    num_bytes: int
    """UTF-8 bytes of the document."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Those of `Loaded.sizes`, for records."""
    idle: str = ""
    """Note that the method was full attention on a document of this length; else ""."""
    adapted: bool = True
    """As in `Loaded`."""

    @property
    def value(self) -> float:
        """Perplexity of the document: exp of the mean over tokens."""
        return math.exp(self.nll.double().mean())

    @property
    def bits_per_byte(self) -> float:
        """Bits needed for the document's tokens, per byte of it: comparable between tokenizers."""
        return float(self.nll.double().sum()) / math.log(2) / self.num_bytes

    def from_position(self, position: int) -> float:
        """Return the perplexity of the tokens from a position on, which must exist."""
        return math.exp(self.nll[max(0, position - 1) :].double().mean())

    def buckets(self, first: int = 512) -> Iterator[tuple[int, int, Tensor]]:
        """Yield buckets of positions, 0 to 511, 512 to 1023, 1024 to 2047 and so on, as (first,
        position after the last, losses in float64); `first` is the length of the first two."""
        start = 0
        end = first
        length = len(self.nll) + 1
        while start < length:
            # Token 0 has no prediction.
            # mutant perplexity: buckets shifted by one token
            nll = self.nll[max(0, start - 1) : end - 1]
            if len(nll):
                yield start, min(end, length), nll.double()
            start, end = end, 2 * end

    def by_position(self) -> list[tuple[int, int, float]]:
        """Return the perplexity of each bucket, (first, position after the last, perplexity)."""
        return [(start, end, math.exp(nll.mean())) for start, end, nll in self.buckets()]


def measure(loaded: Loaded, text: str, name: str, chunk_size: int | None = None) -> Perplexity:
    """Measure a model on a whole text, with progress on the terminal.

    Args:
        name: The method's name, for the progress.
        chunk_size: Tokens per forward pass; None takes 1024, under num_groups the whole text.
    """
    input_ids = encode(loaded, text, at_least=2)
    length = input_ids.shape[1]
    if getattr(loaded.config, "num_groups", None):
        if chunk_size is not None:
            raise UserError(WHOLE)
        chunk_size = length
    with progress(f"{name}, {length} tokens", length) as advance, one_line():
        nll = document_nll(loaded.model, input_ids, chunk_size=chunk_size or 1024, on_chunk=advance)
    return Perplexity(
        nll, len(text.encode()), loaded.sizes(), loaded.idle_note(length), loaded.adapted
    )


def to_records(results: Mapping[str, Perplexity], model: str) -> list[Record]:
    """Make the quality.* records of each method, of the whole document and of each bucket.

    Args:
        results: By name: the method, and for a variant its settings behind a blank.
        model: The folder or name.
    """
    records = []
    for method, result in results.items():
        params = {
            "method": method.split()[0],
            "model": Path(model).name,
            "task": "document",
            "length": len(result.nll) + 1,
            **result.sizes,
        }
        records.append(make_record("quality.perplexity", result.value, params))
        records.append(make_record("quality.bits_per_byte", result.bits_per_byte, params))
        for start, end, value in result.by_position():
            bucket = {**params, "bucket": f"{start}-{end - 1}"}
            records.append(make_record("quality.perplexity", value, bucket))
    return records


def print_table(results: Mapping[str, Perplexity]) -> None:
    """Print perplexity by position, a column for each method. Where full attention is among them,
    print also CCA's difference to it, that of every method on the positions behind the window, and
    which command improves the model."""
    first = next(iter(results.values()))
    title = f"perplexity of {len(first.nll) + 1} tokens, {first.num_bytes} bytes"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("positions")
    titles = {method: method.replace("cca", "CCA") for method in results}
    for method in results:
        table.add_column("full attention" if method == "full" else titles[method], justify="right")
        if method == "cca" and "full" in results:
            table.add_column("difference", justify="right")

    # A row for each bucket of positions, then the whole.
    def add_row(name: str, values: Iterable[float]) -> None:
        cells = []
        by_method = dict(zip(results, values))
        for method, value in by_method.items():
            cells.append(f"{value:.4f}")
            if method == "cca" and "full" in by_method:
                cells.append(_difference(value, by_method["full"]))
        table.add_row(name, *cells)

    for buckets in zip(*(result.by_position() for result in results.values())):
        start, end, _ = buckets[0]
        add_row(f"{start} - {end - 1}", (value for _, _, value in buckets))
    table.add_section()
    add_row("all", (result.value for result in results.values()))
    add_row("bits per byte", (result.bits_per_byte for result in results.values()))
    console().print(table)
    for note in filter(None, dict.fromkeys(result.idle for result in results.values())):
        console().print(note)
    # Methods differ from the window's end on: before it all see every token.
    full, cca = results.get("full"), results.get("cca")
    if full is None or cca is None or cca.idle:
        return
    window_size = cca.sizes["window_size"]
    base = full.from_position(window_size)
    losses = {
        name: _difference(result.from_position(window_size), base)
        for name, result in results.items()
        if result is not full
    }
    far = ", ".join(f"{titles[name]} {loss}" for name, loss in losses.items())
    console().print(f"positions from {window_size} on: {far}")
    if not cca.adapted:
        sinks = "" if cca.sizes.get("sinks") else f"--sinks {CCAConfig.sink_size}; "
        console().print(f"not adapted: try {sinks}corecontext train")


def _difference(value: float, base: float) -> str:
    """Format how much larger a perplexity is than another, in percent."""
    return f"{100 * (value / base - 1):+.1f} %"


def document_nll(
    model: Any,
    input_ids: Tensor,
    *,
    chunk_size: int = 1024,
    on_chunk: Callable[[int], Any] = lambda tokens: None,
) -> Tensor:
    """Compute the negative log-likelihood of every token but the first.

    The cache carries the past from chunk to chunk, so each token sees all before it, exactly as in
    one pass over the document. With fetch each token chooses for itself, as decoded ones do.

    Args:
        model: A Hugging Face causal language model, CCA enabled or not.
        input_ids: [1, L], L >= 2.
        chunk_size: Tokens per forward pass; logits of so many tokens are held at once.
        on_chunk: Called after each chunk with its number of tokens.

    Returns:
        [L - 1], nats, float32, on the CPU.

    Raises:
        UserError: a loss is NaN or infinite.
    """
    cache = None
    losses = []
    length = input_ids.shape[1]
    options = scored(model)
    with torch.inference_mode(), rotation_of(model, length):
        for start in range(0, length, chunk_size):
            chunk = input_ids[:, start : start + chunk_size]
            out = model(chunk, **with_cache(cache), use_cache=True, **options)
            cache = returned_cache(out)
            targets = input_ids[0, start + 1 : start + 1 + chunk.shape[1]]
            logits = out.logits[0, : len(targets)].float()
            losses.append(F.cross_entropy(logits, targets, reduction="none").cpu())
            on_chunk(chunk.shape[1])
    nll = torch.cat(losses)
    # mutant perplexity: losses that are no numbers pass
    if not nll.isfinite().all():
        position = int((~nll.isfinite()).nonzero()[0])
        raise UserError(
            f"logits must be finite, got NaN or infinity at token {position}. Check the weights "
            "or take another --dtype."
        )
    return nll


def hidden_nll(model: Any, hidden: Tensor, input_ids: Tensor, *, chunk_size: int = 1024) -> Tensor:
    """Compute the result of `document_nll` from the last hidden states [1, L, hidden size] of a
    prompt that was read at once; logits of only chunk_size tokens exist at a time."""
    losses = []
    with torch.inference_mode():
        for start in range(0, input_ids.shape[1] - 1, chunk_size):
            targets = input_ids[0, start + 1 : start + 1 + chunk_size]
            logits = head_logits(model, hidden[0, start : start + len(targets)])
            losses.append(F.cross_entropy(logits, targets, reduction="none").cpu())
    return torch.cat(losses)
