"""Measure the miniature's models: perplexity by position, answers by distance, time and cache."""

import contextlib
import functools
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from corecontext.files import UserError
from corecontext.integrations.hf.cache_layers import cache_bytes, host_bytes
from corecontext.integrations.hf.cache_name import returned_cache
from corecontext.terminal import progress
from reproduction.miniature import autocast, nll_of
from reproduction.sizes import Size
from reproduction.texts import END, Corpus, Row

BATCH_TOKENS = 32768


def windows(
    corpus: Corpus, size: Size, split: str, tokens: int | None = None
) -> list[tuple[int, int]]:
    """Return a sample of the non-overlapping windows inside documents: start and document number.

    Args:
        tokens: Size of the sample; default `size.eval_tokens`.

    Raises:
        UserError: no document is as long.
    """
    ids = np.asarray(corpus.splits[split])
    length = size.length
    edges = [-1, *np.flatnonzero(ids == END).tolist(), len(ids)]
    starts = [
        (start, document)
        for document, (a, b) in enumerate(itertools.pairwise(edges))
        for start in range(a + 1, b - length + 1, length)
    ]
    if not starts:
        raise UserError(f"lm_{split} must have a document of at least {length} tokens, got none.")
    random.Random(0).shuffle(starts)
    return sorted(starts[: max(1, (tokens or size.eval_tokens) // length)])


@torch.no_grad()
def window_nll(
    model: LlamaForCausalLM,
    corpus: Corpus,
    size: Size,
    split: str,
    device: str,
    tokens: int | None = None,
) -> np.ndarray:
    """Return negative log-likelihoods in nats of windows inside documents, [windows, L - 1],
    float32."""
    ids = np.asarray(corpus.splits[split])
    length = size.length
    starts = [start for start, _ in windows(corpus, size, split, tokens)]
    rows = max(1, BATCH_TOKENS // length)
    losses = []
    with progress(f"perplexity on {split}", max(1, len(starts))) as advance:
        for i in range(0, len(starts), rows):
            batch = np.stack([ids[a : a + length] for a in starts[i : i + rows]]).astype(np.int64)
            with autocast(device):
                nll, _ = nll_of(model, torch.from_numpy(batch).to(device))
            losses.append(nll.float().cpu().numpy())
            advance(len(batch))
    return np.concatenate(losses)


@torch.inference_mode()
def answers_right(
    model: LlamaForCausalLM, rows: Sequence[Row], device: str, padded: bool = True
) -> list[tuple[int, bool]]:
    """Return, for each question, the tokens back to its answer's source and whether it is right.

    Right is an answer that greedy decoding would give: each of its tokens is the likeliest.

    Args:
        padded: Rows of several lengths may go together. Not under MInference, which picks keys by
            the last queries.
    """
    answers: list[tuple[int, bool]] = []
    for batch in _batches(rows, padded):
        ids = torch.full((len(batch), max(len(row.ids) for row in batch)), END)
        for line, row in zip(ids, batch):
            line[: len(row.ids)] = torch.from_numpy(row.ids)  # padding at the end is not seen
        with autocast(device):
            hits = nll_of(model, ids.to(device))[1].cpu()
        answers += [
            (distance, bool(hit[a - 1 : b - 1].all()))
            for hit, row in zip(hits, batch)
            for a, b, distance in row.answers
        ]
    return answers


def _batches(rows: Sequence[Row], padded: bool) -> Iterator[list[Row]]:
    """Yield rows in order, in batches of at most BATCH_TOKENS with padding, if that is allowed."""
    batch: list[Row] = []
    for row in rows:
        longest = max(len(member.ids) for member in [*batch, row])
        too_large = (len(batch) + 1) * longest > BATCH_TOKENS
        if batch and (too_large or (not padded and len(row.ids) != len(batch[0].ids))):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@functools.lru_cache(maxsize=32)
def fact_rows(corpus: Corpus, length: int, questions: int, seed: int = 0) -> list[Row]:
    """Return held-out texts with facts, the same for every model.

    Raises:
        ValueError: texts are too short for a fact and its question.
    """
    rng = random.Random(f"test-{seed}-{length}")
    rows: list[Row] = []
    while sum(len(row.answers) for row in rows) < questions:
        if len(rows) >= 20 * questions:
            raise ValueError(
                f"length must leave room for facts and their questions, got {length} tokens."
            )
        rows.append(corpus.fact_row("test", rng, length, most=8))
    return rows


@functools.lru_cache(maxsize=32)
def qa_rows(corpus: Corpus, size: Size, documents: int) -> list[Row]:
    """Return held-out questions with so many passages, the right one anywhere, that fit the
    length."""
    rng = random.Random(f"qa-{documents}")
    rows = [
        corpus.qa_row("test", question, rng, documents, size.length)
        for question in corpus.questions("test")
    ]
    return [row for row in rows if row is not None][: size.questions]


@functools.lru_cache(maxsize=32)
def planted_qa_rows(corpus: Corpus, size: Size, documents: int) -> list[Row]:
    """Return passages with a fact each and the question about one of them, that fit the length."""
    rng = random.Random(f"planted-{documents}")
    rows = [corpus.planted_qa_row(rng, documents, size.length) for _ in range(size.questions)]
    return [row for row in rows if row is not None]


@torch.inference_mode()
def cloze(model: LlamaForCausalLM, corpus: Corpus, size: Size, device: str) -> list[bool]:
    """Return whether the likeliest of four endings is the right one, by question.

    Endings are a sixteenth of the length, three of them from other places; the rest is prefix.
    """
    ids = np.asarray(corpus.splits["test"])
    rng = random.Random("cloze")
    right = []
    after = size.length // 16
    before = size.length - after
    for _ in range(size.questions):
        start = rng.randrange(len(ids) - before - after)
        prefix = ids[start : start + before]
        ends = [ids[start + before : start + before + after]]
        for _ in range(3):
            elsewhere = rng.randrange(len(ids) - after)
            ends.append(ids[elsewhere : elsewhere + after])
        rows = np.stack([np.concatenate((prefix, end)) for end in ends]).astype(np.int64)
        with autocast(device):
            nll = nll_of(model, torch.from_numpy(rows).to(device))[0][:, -after:].mean(1)
        right.append(int(nll.argmin()) == 0)
    return right


def time_and_cache(
    model: LlamaForCausalLM, size: Size, device: str, dtype: torch.dtype | None = None
) -> tuple[list[float], int, int]:
    """Return samples of the seconds to read a text of the trained length, and its cache's bytes on
    the device and in host memory.

    Weights and cache have one dtype for all methods, as when they are served: bfloat16 on a GPU.
    Under autocast the rotary embedding is float32, and so would be the keys and values that full
    attention's cache is given.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        model.config.vocab_size, (size.latency_rows, size.length), generator=generator
    ).to(device)
    seconds = []
    out = None
    if dtype is None:
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    with _weights_as(model, dtype):
        for _ in range(size.latency_repeats + 1):
            out = None
            _wait(device)
            begin = time.perf_counter()
            with torch.inference_mode():
                out = model(ids, use_cache=True, logits_to_keep=1)
            _wait(device)
            seconds.append((time.perf_counter() - begin) / len(ids))
    cache = returned_cache(out)
    return seconds[1:], cache_bytes(cache) // len(ids), host_bytes(cache) // len(ids)


@contextlib.contextmanager
def _weights_as(model: LlamaForCausalLM, dtype: torch.dtype) -> Iterator[None]:
    """Hold the parameters in another dtype for a with block; buffers, such as frequencies, stay."""
    originals = [(p, p.data) for p in model.parameters()]
    try:
        for p, data in originals:
            p.data = data.to(dtype)
        yield
    finally:
        for p, data in originals:
            p.data = data


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@torch.inference_mode()
def attention_weights(model: LlamaForCausalLM, ids: Tensor) -> list[np.ndarray]:
    """Return full attention's weights by layer, [H, L, L], float32; `ids` [1, L] must be short."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        layers = model(ids, use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    return [layer[0].float().cpu().numpy() for layer in layers]


def top_mass(weights: np.ndarray, share: float = 0.1) -> float:
    """Return the mean share of a query's weight on its most attended keys, in the second half."""
    length = weights.shape[1]
    masses: list[Any] = []
    for t in range(length // 2, length):
        row = np.sort(weights[:, t, : t + 1], axis=1)[:, ::-1]
        masses.append(row[:, : max(1, round(share * (t + 1)))].sum(1))
    return float(np.mean(masses))
