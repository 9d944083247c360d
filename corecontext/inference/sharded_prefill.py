"""Read a very long prompt on several ranks at once, each a part of it, into one compact cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from corecontext.cache import parts_of
from corecontext.distributed.context_parallel import Shard
from corecontext.distributed.kept import Keeper
from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Wire
from corecontext.inference.limits import check_length
from corecontext.inference.prefill import Prefilled, new_cache, prefill
from corecontext.integrations.hf.cache_layers import CCALayer
from corecontext.integrations.hf.enabling import Handle, handle_of


def context_parallel_prefill(
    model: Any,
    input_ids: Tensor,
    wire: Wire,
    *,
    max_length: int | None = None,
    process: int | None = None,
) -> Prefilled | None:
    """Read a prompt with every rank of a group; the result is that of `prefill`, to rounding. A
    collective call.

    Each rank runs the model on its L / N tokens at once (their activations must fit), and receives
    of each layer the core tokens and the last s + g - 1 raw tokens, with fetch all raw tokens.
    Decoding then takes one rank and no exchange: for example
    `model.generate(ids, **with_cache(cache))` with the prompt and the token chosen from the logits.
    A prompt of fewer than two tokens, or shares of a choice, a rank is read whole by each.

    Args:
        model: A Hugging Face causal language model with CCA enabled, the same weights on every
            rank.
        input_ids: The whole prompt on every rank, [1, L], int64, on the model's device.
        wire: This rank's end of the group.
        max_length: Longest sequence, prompt and answer, for a cache of fixed buffers; None makes a
            growing cache.
        process: The rank that gets the cache and the logits; None for all.

    Returns:
        Logits [1, vocabulary] of the next token, the filled cache and the next position; None on
        ranks other than `process`.

    Raises:
        ValueError: CCA is not enabled or already sharded, the prompt is not one row without
            padding, it exceeds max_length or the model's positions, or ranks were given different
            prompts.
        NotImplementedError: sliding-window layers, prefill="full" without fetch, fetch with heads
            that keep every token, backend="reference" or a cache in 8 bits, which several ranks
            cannot have.
    """
    handle = handle_of(model)
    _check(handle, input_ids, wire, max_length, process)
    length = input_ids.shape[1]
    check_length(model.config, length)
    if wire.size > 1:
        _check_same(input_ids, wire)
    share = handle.config.fetch_share if handle.config.fetch_groups else 1
    if length < 2 * wire.size * share or wire.size == 1:
        whole = prefill(model, input_ids, cache=new_cache(model, max_length))
        return whole if process in (None, wire.rank) else None

    # Every rank reads its tokens; the keeper collects each layer's entries on the target ranks.
    keeper = Keeper(handle.rollback, process, handle.config.store)
    layout = Layout.balanced(length, wire.size, wire.rank, share)
    handle.shard = Shard(wire, layout, keeper=keeper)
    try:
        with torch.no_grad():
            logits = model(
                layout.take(input_ids),
                position_ids=layout.positions(input_ids.device),
                use_cache=False,
                logits_to_keep=1,
            ).logits[:, -1]
    finally:
        handle.shard = None

    # The rank of the prompt's last token sends its logits to the target ranks.
    logits = logits.contiguous()
    targets = keeper.targets(wire.size)
    last = layout.owners[-1]
    sends = []
    receives = []
    if wire.rank == last:
        sends = [(rank, logits) for rank in targets if rank != last]
    elif wire.rank in targets:
        receives = [(last, logits)]
    wire.exchange(sends, receives)
    if wire.rank not in targets:
        return None
    cache = new_cache(model, max_length)
    cache.layers = [_filled(handle, i, keeper, length, max_length) for i in range(len(handle.full))]
    return Prefilled(logits, cache, torch.tensor([length], device=input_ids.device))


def _check(
    handle: Handle | None,
    input_ids: Tensor,
    wire: Wire,
    max_length: int | None,
    process: int | None,
) -> None:
    """Raise, before any exchange, for arguments and settings that are wrong on every rank."""
    if handle is None:
        raise ValueError(
            "model must have CCA enabled, got one without. Call corecontext.enable(model)."
        )
    if handle.shard is not None:
        raise ValueError(
            "handle.shard must be None before a prefill, which sets it while it runs, got one."
        )
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise ValueError(
            "input_ids must be [1, L], one prompt without padding, got shape "
            f"{list(input_ids.shape)}. Read the rows of a batch one by one."
        )
    if max_length is not None and input_ids.shape[1] > max_length:
        raise ValueError(
            f"max_length must be at least the prompt's {input_ids.shape[1]} tokens, got "
            f"{max_length}."
        )
    if process is not None and not 0 <= process < wire.size:
        raise ValueError(f"process must be one of 0 to {wire.size - 1} or None, got {process}.")
    if wire.size == 1:
        return
    _check_supported(handle)


def _check_supported(handle: Handle) -> None:
    """Raise NotImplementedError for settings under which several processes cannot read a prompt."""
    config = handle.config
    way_out = "cannot be spread over processes. Use prefill on one process."
    if handle.hybrid:
        raise NotImplementedError(
            "a model with sliding-window layers cannot be spread: these layers would see parts of "
            "the prompt only. Use prefill on one process."
        )
    if config.keeps_raw_prompts:
        raise NotImplementedError(f"a prompt of prefill 'full' without fetch {way_out}")
    sizes = {
        size for layer in handle.layers for size in layer.head_group_sizes or (layer.group_size,)
    }
    if config.fetch_groups and 1 in sizes:
        raise NotImplementedError(
            f"a prompt with fetch_groups={config.fetch_groups} and heads that keep every token "
            f"{way_out}"
        )
    if config.backend == "reference":
        raise NotImplementedError(f"backend 'reference' {way_out}")
    if config.cache_dtype != "auto":
        raise NotImplementedError(
            f"a cache in {config.cache_dtype} cannot be filled by several processes: they attend "
            "to tokens before these are rounded. Use cache_dtype='auto'."
        )


def _check_same(input_ids: Tensor, wire: Wire) -> None:
    """Raise unless all ranks were given the same prompt: otherwise they would wait for one another,
    or mix prompts."""
    count = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
    checksum = torch.stack((count[-1], (input_ids[0] * count).sum()))
    checksums = wire.gather(checksum).wait()
    if not bool((checksums == checksum).all()):
        raise ValueError(
            "input_ids must be the whole prompt and the same on every process, got lengths "
            f"{checksums.view(-1, 2)[:, 0].tolist()} or other tokens."
        )


def _filled(
    handle: Handle, index: int, keeper: Keeper, length: int, max_length: int | None
) -> CCALayer:
    """Fill a layer's cache as a prefill on one rank leaves it; frees the keeper's tensors."""
    config = handle.layers[index]
    rotary = keeper.layers[0].rotary
    layer = CCALayer(config, rotary, max_length=max_length, rollback=handle.rollback)
    layer.is_initialized = True
    for cache in parts_of(layer.compact):
        kept = keeper.layers.pop(0)
        cache.fill(
            [x for x in (kept.keys, kept.values, kept.masses) if x is not None],
            length,
            group_size=kept.group_size,
            raw=[x.to(kept.keys.device) for x in kept.raw],
        )
    return layer
