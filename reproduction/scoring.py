"""Measure the miniature's models: perplexity by position, answers by distance, time and cache."""

from __future__ import annotations

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
from corecontext.integrations.hf_cache import cache_bytes
from corecontext.terminal import progress
from reproduction.miniature import autocast, nll_of
from reproduction.sizes import Size
from reproduction.texts import END, Corpus, Row

BATCH_TOKENS = 32768


def windows(
    corpus: Corpus, size: Size, split: str, tokens: int | None = None
) -> list[tuple[int, int]]:
    """Where windows begin and the number of the document that each is in, in order: a sample, of
    `size.eval_tokens` unless told, of the non-overlapping windows inside all documents.

    Raises:
        UserError: no document is as long.
    """
    ids, length = np.asarray(corpus.splits[split]), size.length
    edges = [-1, *np.flatnonzero(ids == END).tolist(), len(ids)]
    found = [
        (start, document)
        for document, (a, b) in enumerate(itertools.pairwise(edges))
        for start in range(a + 1, b - length + 1, length)
    ]
    if not found:
        raise UserError(f"lm_{split} must have a document of at least {length} tokens, got none.")
    random.Random(0).shuffle(found)
    return sorted(found[: max(1, (tokens or size.eval_tokens) // length)])


@torch.no_grad()
def window_nll(
    model: LlamaForCausalLM,
    corpus: Corpus,
    size: Size,
    split: str,
    device: str,
    tokens: int | None = None,
) -> np.ndarray:
    """Negative log-likelihoods in nats of non-overlapping windows inside documents, [windows, L -
    1], float32."""
    ids, length = np.asarray(corpus.splits[split]), size.length
    starts = [start for start, _ in windows(corpus, size, split, tokens)]
    rows, found = max(1, BATCH_TOKENS // length), []
    with progress(f"perplexity on {split}", max(1, len(starts))) as advance:
        for i in range(0, len(starts), rows):
            some = np.stack([ids[a : a + length] for a in starts[i : i + rows]]).astype(np.int64)
            with autocast(device):
                found.append(
                    nll_of(model, torch.from_numpy(some).to(device))[0].float().cpu().numpy()
                )
            advance(len(some))
    return np.concatenate(found)


@torch.inference_mode()
def answers_right(
    model: LlamaForCausalLM, rows: Sequence[Row], device: str, padded: bool = True
) -> list[tuple[int, bool]]:
    """Of each question: tokens back to what answers it, and whether greedy decoding would give the
    answer.

    That is when each of the answer's tokens is the likeliest after the ones before.

    Args:
        padded: Rows of several lengths may go together. Not under MInference, which picks keys by
            the last queries.
    """
    found: list[tuple[int, bool]] = []
    for some in _batches(rows, padded):
        ids = torch.full((len(some), max(len(row.ids) for row in some)), END)
        for at, row in zip(ids, some):
            at[: len(row.ids)] = torch.from_numpy(
                row.ids
            )  # what comes after a row, it does not see
        with autocast(device):
            hits = nll_of(model, ids.to(device))[1].cpu()
        found += [
            (distance, bool(hit[a - 1 : b - 1].all()))
            for hit, row in zip(hits, some)
            for a, b, distance in row.answers
        ]
    return found


def _batches(rows: Sequence[Row], padded: bool) -> Iterator[list[Row]]:
    """Rows in order, as many at a time as have BATCH_TOKENS with their padding, if there may be
    any."""
    some: list[Row] = []
    for row in rows:
        if some and (
            (len(some) + 1) * max(len(one.ids) for one in [*some, row]) > BATCH_TOKENS
            or (not padded and len(row.ids) != len(some[0].ids))
        ):
            yield some
            some = []
        some.append(row)
    if some:
        yield some


@functools.lru_cache(maxsize=32)
def fact_rows(corpus: Corpus, length: int, questions: int, seed: int = 0) -> list[Row]:
    """Held-out texts with facts, the same for every model.

    Raises:
        ValueError: texts are too short for a fact and its question.
    """
    rng, rows = random.Random(f"test-{seed}-{length}"), []
    while sum(len(row.answers) for row in rows) < questions:
        if len(rows) >= 20 * questions:
            raise ValueError(
                f"length must leave room for facts and their questions, got {length} tokens."
            )
        rows.append(corpus.fact_row("test", rng, length, most=8))
    return rows


@functools.lru_cache(maxsize=32)
def qa_rows(corpus: Corpus, size: Size, documents: int) -> list[Row]:
    """Held-out questions with so many passages, the right one anywhere; those that fit the
    length."""
    rng = random.Random(f"qa-{documents}")
    rows = [
        corpus.qa_row("test", one, rng, documents, size.length) for one in corpus.questions("test")
    ]
    return [row for row in rows if row is not None][: size.questions]


@functools.lru_cache(maxsize=32)
def planted_qa_rows(corpus: Corpus, size: Size, documents: int) -> list[Row]:
    """As many passages, each with a fact of its own, and the question about one of them; those that
    fit the length."""
    rng = random.Random(f"planted-{documents}")
    rows = [corpus.planted_qa_row(rng, documents, size.length) for _ in range(size.questions)]
    return [row for row in rows if row is not None]


@torch.inference_mode()
def cloze(model: LlamaForCausalLM, corpus: Corpus, size: Size, device: str) -> list[bool]:
    """Which of four stretches goes on with a text: the likeliest is the right one or not.

    The length less a sixteenth is prefix, the four endings are a sixteenth each, three of them from
    other places.
    """
    ids, rng, found = np.asarray(corpus.splits["test"]), random.Random("cloze"), []
    before, after = size.length - size.length // 16, size.length // 16
    for _ in range(size.questions):
        start = rng.randrange(len(ids) - before - after)
        prefix = ids[start : start + before]
        ends = [ids[start + before : start + before + after]]
        for _ in range(3):
            other = rng.randrange(len(ids) - after)
            ends.append(ids[other : other + after])
        rows = torch.from_numpy(
            np.stack([np.concatenate((prefix, end)) for end in ends]).astype(np.int64)
        )
        with autocast(device):
            nll = nll_of(model, rows.to(device))[0][:, -after:].mean(1)
        found.append(int(nll.argmin()) == 0)
    return found


def time_and_cache(
    model: LlamaForCausalLM, size: Size, device: str, dtype: torch.dtype | None = None
) -> tuple[list[float], int]:
    """Seconds of reading texts of the trained length into a cache, several times, and the cache's
    bytes; of one text.

    Weights and cache have one dtype for all methods, as when they are served: bfloat16 on a GPU.
    Under autocast the rotary embedding is float32, and so would be the keys and values that full
    attention's cache is given.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        model.config.vocab_size, (size.latency_rows, size.length), generator=generator
    ).to(device)
    seconds, out = [], None
    with _weights_as(
        model, dtype or (torch.bfloat16 if device.startswith("cuda") else torch.float32)
    ):
        for _ in range(size.latency_repeats + 1):
            out = None
            _wait(device)
            begin = time.perf_counter()
            with torch.inference_mode():
                out = model(ids, use_cache=True, logits_to_keep=1)
            _wait(device)
            seconds.append((time.perf_counter() - begin) / len(ids))
    return seconds[1:], cache_bytes(out.past_key_values) // len(ids)


@contextlib.contextmanager
def _weights_as(model: LlamaForCausalLM, dtype: torch.dtype) -> Iterator[None]:
    """The model's parameters in another dtype, and as they were afterwards; buffers, such as
    frequencies, stay."""
    held = [(p, p.data) for p in model.parameters()]
    try:
        for p, data in held:
            p.data = data.to(dtype)
        yield
    finally:
        for p, data in held:
            p.data = data


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@torch.inference_mode()
def attention_weights(model: LlamaForCausalLM, ids: Tensor) -> list[np.ndarray]:
    """Full attention's weights by layer, [H, L, L], float32; `ids` [1, L] should be short."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        found = model(ids, use_cache=False, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(before)
    return [one[0].float().cpu().numpy() for one in found]


def top_mass(weights: np.ndarray, share: float = 0.1) -> float:
    """Mean share of a query's weight on the tenth of its keys that have most of it; queries of the
    second half."""
    length = weights.shape[1]
    found: list[Any] = []
    for t in range(length // 2, length):
        row = np.sort(weights[:, t, : t + 1], axis=1)[:, ::-1]
        found.append(row[:, : max(1, round(share * (t + 1)))].sum(1))
    return float(np.mean(found))
