"""Read prompts chunk by chunk, from the longest beginning that another request has read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from corecontext.cache.full import FullLayer
from corecontext.inference.prefill import read_chunk
from corecontext.inference.session import configured
from corecontext.integrations.hf_cache import GivenLayer
from corecontext.integrations.transformers import Handle
from corecontext.serve.memory import CacheMemory
from corecontext.serve.request import Slot


@dataclass(frozen=True)
class PromptReader:
    """Read the prompts of requests, each into a growing cache of its own."""

    model: Any
    handle: Handle
    """The model's CCA handle."""
    chunk_size: int
    """Tokens of a chunk."""
    memory: CacheMemory
    """Its prefix store is read and filled."""
    full: bool
    """Whether prompts are read into caches of full attention."""

    def read(self, slot: Slot) -> Tensor | None:
        """Read the next chunk; return logits [1, vocabulary] after the last chunk, None before."""
        if slot.cache is None:
            self._begin(slot)
        prompt = slot.request.prompt
        start = slot.read
        end = min(len(prompt), start + self.chunk_size)
        with configured(self.handle, slot.config):
            out = read_chunk(self.model, slot.ids, None, [0], slot.cache, start, end)
        slot.read = end
        if end - start == self.chunk_size and not self.full:
            self._share(slot, start)
        return out.logits[:, -1] if end == len(prompt) else None

    def _begin(self, slot: Slot) -> None:
        """Make the cache of a prompt, filled with its longest beginning in the prefix store."""
        request = slot.request
        device = self.model.device
        slot.ids = torch.tensor([list(request.prompt)], device=device)
        slot.generator = torch.Generator(device)
        slot.generator.manual_seed(request.seed)
        if self.full:
            layers = self.memory.shape.layers
            slot.cache = Cache(
                layers=[GivenLayer(FullLayer(request.length)) for _ in range(layers)]
            )
            return
        slot.cache = DynamicCache(config=self.model.config)
        slot.node = self.memory.prefixes.find(slot.config, request.prompt)
        if slot.node is not None:
            self.memory.prefixes.load(slot.node, slot.cache)
            slot.read = slot.cached_tokens = slot.node.length

    def _share(self, slot: Slot, start: int) -> None:
        """Add the chunk that begins at `start` to the prefix store, if its parent is there."""
        if (slot.node is None) != (start == 0):
            return
        memory = self.memory
        room = memory.budget - memory.allocated + memory.prefixes.nbytes
        chunk = slot.request.prompt[start : slot.read]
        slot.node = memory.prefixes.add(slot.config, slot.node, chunk, slot.cache, room)
