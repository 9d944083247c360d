"""Read a prompt through a causal language model in chunks, so that activations stay bounded
however long it is."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from corecontext.cache import CompactLayer, HeadsLayer, parts_of
from corecontext.cache.late import catch_up
from corecontext.inference.chunk_size import bytes_per_token, choose_chunk_size, free_bytes
from corecontext.inference.limits import cache_bytes_per_token, check_length, does_not_fit
from corecontext.integrations.hf.cache_layers import CCALayer, GrowingCache, cache_bytes
from corecontext.integrations.hf.cache_name import returned_cache, with_cache
from corecontext.integrations.hf.enabling import scored
from corecontext.integrations.hf.rotation import rotated_length, rotation_of

ANSWER_TOKENS = 256
"""Tokens behind a prompt that a growing cache makes room for together with the prompt's."""


def new_cache(model: Any, max_length: int | None) -> Any:
    """Make an empty cache of transformers, whose layers are compact where CCA is enabled: of fixed
    buffers for `max_length` tokens, or growing."""
    if max_length is None:
        return DynamicCache(config=model.config)
    return StaticCache(model.config, max_cache_len=max_length)


class Prefilled(NamedTuple):
    """A prompt that has been read."""

    logits: Tensor
    """[B, vocabulary], the model's dtype: of the token that follows each row."""
    cache: Any
    """The filled cache (transformers `Cache`)."""
    positions: Tensor
    """[B], int64: the position of the token that follows each row, its length without padding."""


def read_left_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    """Return the number of padded tokens at the beginning of each row.

    Args:
        input_ids: [B, L], B and L at least 1.
        attention_mask: [B, L], 0 for padding; None means no padding.

    Raises:
        TypeError: an argument is no tensor, or holds no integers.
        ValueError: shapes disagree, or a row is not padding followed by at least one token.
    """
    for name, x in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if not isinstance(x, Tensor) and (x is not None or name == "input_ids"):
            raise TypeError(
                f"{name} must be a tensor [B, L], got {type(x).__name__}. Use the tokenizer with "
                "return_tensors='pt'."
            )
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids must be [B, L] with at least one token a row, got shape "
            f"{list(input_ids.shape)}. Put a single prompt into a batch of one."
        )
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise TypeError(
            f"input_ids must be integers, got {input_ids.dtype}. Give the tokenizer's numbers."
        )
    if attention_mask is None:
        return [0] * input_ids.shape[0]
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {list(input_ids.shape)}, got "
            f"{list(attention_mask.shape)}. Give 1 for tokens and 0 for padding on the left."
        )
    mask = attention_mask.bool()
    padded_after_a_token = (mask[:, :-1] & ~mask[:, 1:]).any(1) | ~mask[:, -1]
    pads, wrong = torch.stack(((~mask).sum(1), padded_after_a_token)).tolist()
    if (length := mask.shape[1]) in pads:
        raise ValueError(
            "attention_mask must leave at least one token in each row, got only padding in row "
            f"{pads.index(length)}. Leave empty prompts out."
        )
    if any(wrong):
        raise ValueError(
            "attention_mask must have padding only on the left, got otherwise in row "
            f"{wrong.index(1)}. Use a tokenizer with padding_side='left'."
        )
    return pads


def prefill(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cache: Any = None,
    chunk_size: int | None = None,
    on_chunk: Callable[[int], Any] = lambda tokens: None,
) -> Prefilled:
    """Read a prompt chunk by chunk; logits are made for the last token of each row only.

    Chunks before the last run the model without its output head. Every token sees what it would
    see in one pass.

    Args:
        model: A Hugging Face causal language model, CCA enabled or not.
        input_ids: [B, L], int64, on the model's device.
        attention_mask: [B, L], 0 for padding on the left; None means no padding.
        cache: An empty transformers `Cache`; None makes a growing one.
        chunk_size: Tokens a row in one forward pass, at least 1; None follows from the model's size
            and the free memory. Under `CCAConfig.num_groups`, which needs the whole prompt at once,
            None means the whole prompt.
        on_chunk: Called after each chunk with the tokens a row that have been read.

    Raises:
        ValueError: the prompt exceeds the model's positions, padding is not on the left, the cache
            is not empty, chunk_size is less than 1, or rows would rotate by different frequencies.
        MemoryError: GPU memory ran out; says what length, batch or chunk would fit.
    """
    pads = read_left_padding(input_ids, attention_mask)
    batch, length = input_ids.shape
    check_length(model.config, length - min(pads))
    if cache is not None and int(cache.get_seq_length()):
        raise ValueError(
            f"cache must be empty, got {int(cache.get_seq_length())} tokens. Reset it or make a "
            "new one."
        )
    if chunk_size is None:
        chunk_size = _default_chunk_size(model, input_ids)
    elif chunk_size < 1:
        raise ValueError(
            f"chunk_size must be at least 1, got {chunk_size}. Leave it out to have it chosen."
        )
    if cache is None:
        cache = GrowingCache(model.config, length + ANSWER_TOKENS)
    mask = attention_mask if max(pads) else None
    meter = _Meter(input_ids.device)
    done = 0
    out = None
    out_of_memory = None
    rotated = rotated_length(model, [length - pad for pad in pads])  # None: all lengths alike
    while done < length:
        end = min(length, done + chunk_size)
        try:
            with rotation_of(model, rotated):
                out = read_chunk(model, input_ids, mask, pads, cache, done, end)
        except torch.OutOfMemoryError:
            out_of_memory = meter.explain(model, batch, length, chunk_size, done, cache)
        # Raised outside of `except`, whose traceback would keep the chunk's tensors alive.
        if out_of_memory is not None:
            raise MemoryError(out_of_memory)
        cache = returned_cache(out)
        done = end
        meter.chunk_done()
        on_chunk(done)
    end_prompt(cache)
    if any(pads):
        positions = torch.tensor([length - pad for pad in pads], device=input_ids.device)
    else:
        positions = torch.full((batch,), length, device=input_ids.device)  # no copy from the host
    return Prefilled(out.logits[:, -1], cache, positions)


def _default_chunk_size(model: Any, input_ids: Tensor) -> int:
    """Choose the tokens a row in one chunk of a prompt [B, L]."""
    batch, length = input_ids.shape
    settings = getattr(model.config, "cca", None) or {}
    if settings.get("num_groups") is not None:
        return length  # g follows from the length of the first append
    return choose_chunk_size(model.config, model.dtype, input_ids.device, batch)


@torch.no_grad()
def read_chunk(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    pads: list[int],
    cache: Any,
    start: int,
    end: int,
    *,
    all_logits: bool = False,
) -> Any:
    """Run the model on the tokens start .. end - 1 of a prompt.

    Args:
        input_ids: [B, L], the whole prompt.
        attention_mask: [B, L], or None without padding.
        pads: Left padding of each row, tokens.
        cache: Holds the tokens before `start`; None makes a growing one.
        all_logits: Whether to make logits of all tokens of the chunk, which are scored.

    Returns:
        The model's output. Its logits are [B, end - start, vocabulary] with `all_logits`, else
        [B, 1, vocabulary] after the last chunk; chunks before run without the output head.
    """
    positions = torch.arange(start, end, device=input_ids.device)[None]
    if any(pads):
        # mutant inference: positions count padding
        positions = (positions - torch.tensor(pads, device=input_ids.device)[:, None]).clamp(min=0)
    # Saves the append a device sync, and tells it a last chunk of one token from a step.
    for layer in _compact_layers(cache):
        layer.expect(start)
    options: dict[str, Any] = {
        "position_ids": positions,
        **with_cache(cache),
        "use_cache": True,
        "attention_mask": None if attention_mask is None else attention_mask[:, :end],
    }
    if all_logits:
        return model(input_ids[:, start:end], **options, **scored(model))
    if end < input_ids.shape[1]:
        return model.get_decoder()(input_ids[:, start:end], **options)
    return model(input_ids[:, start:end], logits_to_keep=1, **options)


def end_prompt(cache: Any) -> None:
    """Make core tokens that come late, those of all layers together, and drop raw tokens that
    caches keep only while full attention reads a prompt."""
    layers = list(_compact_layers(cache))
    catch_up([part for layer in layers for part in parts_of(layer) if part.is_due])
    for layer in layers:
        layer.end_prompt()


def _compact_layers(cache: Any) -> Iterator[CompactLayer | HeadsLayer]:
    """Yield the compact layers in a cache of transformers."""
    for layer in getattr(cache, "layers", ()):
        compact = getattr(layer, "compact", None)
        if isinstance(compact, CompactLayer | HeadsLayer):
            yield compact


class _Meter:
    """Measure the memory of a prefill on a GPU, for the message if it runs out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free = free_bytes(device)
        self.chunk_bytes = 0
        if self.free is not None:
            torch.cuda.reset_peak_memory_stats(device)

    def chunk_done(self) -> None:
        """Record the bytes of the chunk's activations: of its peak above the memory that it left
        allocated."""
        if self.free is not None:
            counts = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
            self.chunk_bytes = max(self.chunk_bytes, counts["peak"] - counts["current"])

    def explain(
        self, model: Any, batch: int, length: int, chunk: int, done: int, cache: Any
    ) -> str:
        """Return the message after memory ran out, with estimates before the first whole chunk."""
        sizes = (model.config, model.dtype)
        chunk_bytes = self.chunk_bytes or batch * min(chunk, length) * bytes_per_token(*sizes)
        token_bytes = _measured_cache_bytes_per_token(cache, done)
        token_bytes = token_bytes or batch * cache_bytes_per_token(*sizes)
        return does_not_fit(batch, length, chunk, done, self.free or 0, chunk_bytes, token_bytes)


def _measured_cache_bytes_per_token(cache: Any, tokens: int) -> float:
    """Measure the bytes that one more token in each row adds to a cache of `tokens` a row, without
    ring and sinks, which do not grow; 0 before the first chunk."""
    if cache is None or not tokens:
        return 0.0
    raw_bytes = sum(
        layer.compact.raw_bytes
        for layer in cache.layers
        if isinstance(layer, CCALayer) and not layer.compact.is_empty
    )
    return (cache_bytes(cache) - raw_bytes) / tokens
