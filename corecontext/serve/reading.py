"""Read prompts chunk by chunk, from the longest beginning that another request has read."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from corecontext.cache import parts_of
from corecontext.cache.full import FullLayer
from corecontext.inference.prefill import end_prompt, read_chunk
from corecontext.inference.session import configured
from corecontext.integrations.hf.cache_layers import GivenLayer, GrowingCache
from corecontext.integrations.hf.enabling import handle_of
from corecontext.serve.logprobs import add_prompt_logprobs
from corecontext.serve.memory import CacheMemory
from corecontext.serve.request import Slot

SCORED_CHUNK = 256
"""Most tokens of a chunk whose logits are all used: each token has a vocabulary of them."""


def read_next_chunk(model: Any, slot: Slot, memory: CacheMemory) -> Tensor | None:
    """Read the next chunk of a prompt into its own growing cache.

    Args:
        model: A causal language model with CCA enabled.
        slot: The request; full attention reads it if its `config` is None.
        memory: Its prefix store is read and filled, and has the number of tokens in a chunk.

    Returns:
        Logits [1, vocabulary] after the last chunk, None before.
    """
    begins = slot.cache is None
    if begins:
        _begin(model, slot, memory)

    prefixes = memory.prefixes
    prompt = slot.request.prompt
    scored = slot.request.prompt_logprobs
    start = slot.read
    chunk_end = prefixes.chunk_end(slot.config, start)
    if scored:
        chunk_end = min(chunk_end, start + SCORED_CHUNK)
    end = min(len(prompt), chunk_end)
    mask, pads = None, [0]  # one row without padding
    # Other requests have other settings, so the model gets this one's for the chunk only.
    with configured(handle_of(model), slot.config and slot.pool.reading):
        out = read_chunk(model, slot.ids, mask, pads, slot.cache, start, end, all_logits=scored)
    slot.read = end
    if scored:
        add_prompt_logprobs(slot, out.logits[0], start)
    if begins and slot.config is not None:
        # The first append has made the buffers; a row has the whole ring.
        for layer in slot.cache.layers:
            for entries in parts_of(layer.compact):
                entries.grow_ring(None)

    # Keep the state for prompts that begin alike; they are found by whole chunks. A prompt that is
    # scored is read in other chunks.
    if end == chunk_end and not scored and _shares(slot):
        room = memory.unallocated + prefixes.nbytes
        slot.node = prefixes.add(slot.config, slot.node, prompt[start:end], slot.cache, room)
    if end < len(prompt):
        return None
    end_prompt(slot.cache)
    return out.logits[:, -1]


def _shares(slot: Slot) -> bool:
    """Whether other prompts may continue from this one's beginning: not where full attention reads
    them for a row without raw tokens, of which a node has none."""
    # mutant prefill: a prompt goes on from a beginning without raw tokens
    return slot.config is None or not slot.config.keeps_raw_while_reading


def _begin(model: Any, slot: Slot, memory: CacheMemory) -> None:
    """Make the cache of a prompt, filled with its longest beginning in the prefix store."""
    request = slot.request
    slot.ids = torch.tensor([list(request.prompt)], device=model.device)
    slot.generator = torch.Generator(model.device)
    slot.generator.manual_seed(request.seed)
    # Buffers would grow by a quarter at a time, beyond the bytes of a row that they are counted as.
    length = len(request.prompt)
    if slot.config is None:
        layers = [FullLayer(request.length) for _ in range(memory.shape.sizes.layers)]
        slot.cache = Cache(layers=[GivenLayer(layer) for layer in layers])
    else:
        # mutant serve: the cache of a prompt grows beyond its row
        slot.cache = GrowingCache(model.config, planned_length=length)
    # mutant serve: a prompt that is scored begins with the cache of another
    if not request.prompt_logprobs and _shares(slot):
        slot.node = memory.prefixes.find(slot.config, request.prompt)
    if slot.node is None:
        return
    memory.prefixes.load(slot.node, slot.cache, slot.pool.reading)
    slot.read = slot.cached_tokens = slot.node.length
    if slot.config is not None:
        for layer in slot.cache.layers:
            layer.compact.plan(length)
