"""Keep the raw tokens of fetch in host memory, in pages numbered as those of their layer's core
tokens: the tokens that a core page stands for are written, shared and evicted with it. Slots on the
device have copies of groups that were fetched lately. Needs vLLM."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger

from corecontext.cache.host_memory import available_bytes, host_zeros
from corecontext.integrations.vllm.cache_specs import CoreSpec
from corecontext.integrations.vllm.host_writes import HostWrites
from corecontext.integrations.vllm.page_layout import SLOTS_SHARE
from corecontext.ops.triton.paged.group_slots import GroupSlots
from corecontext.ops.triton.paged.token_rows import clock_of

OPTION = "core_context_host_gib"
"""Key of vLLM's --additional-config: GiB of host memory for the raw tokens of a worker; without it,
all that is available."""
_logger = init_logger("vllm.core_context")


class HostTokens(NamedTuple):
    """Hold the raw tokens of a layer."""

    tokens: Tensor
    """[P, Hkv, tokens of a core page, 2 D] in host memory, keys before values."""
    slots: GroupSlots | None


class HostPages:
    """Make the host pages and the slots of all layers of a worker.

    Args:
        vllm_config: The server's settings.
        spec: That of the caches of core tokens.
        num_layers: Layers with such caches.
        num_slots: Slots that a request needs, of each layer and KV head; 0 for none.

    Raises:
        ValueError: the option is no number of GiB.
    """

    def __init__(
        self, vllm_config: VllmConfig, spec: CoreSpec, num_layers: int, num_slots: int
    ) -> None:
        self.cache_config = vllm_config.cache_config
        self.spec = spec
        self.shape = (spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
        self.page_bytes = num_layers * math.prod(self.shape) * spec.dtype.itemsize
        self.device_page_bytes = num_layers * spec.page_size_bytes
        self.gib = (getattr(vllm_config, "additional_config", None) or {}).get(OPTION)
        if self.gib is not None and not (isinstance(self.gib, int | float) and self.gib > 0):
            raise ValueError(
                f"{OPTION} must be a number more than 0, got {self.gib!r}. Change it by "
                "--additional-config."
            )
        self.is_checked = False
        self.has_room = False
        self.num_slots = num_slots * vllm_config.scheduler_config.max_num_seqs
        self.group = (spec.tokens_per_state, 2 * spec.head_size)
        captured = vllm_config.compilation_config.max_cudagraph_capture_size
        self.writes = HostWrites(captured or 0)

    def slots(self, device: torch.device) -> Tensor | None:
        """Return memory for the slots of a layer, [Hkv, n, g, 2 D]; None without slots."""
        if not self.num_slots:
            return None
        if device.type == "cuda" and not self.has_room:
            total = torch.cuda.get_device_properties(device).total_memory
            self.num_slots = self.fitting(total, torch.cuda.memory_allocated(device))
            self.has_room = True
        shape = (self.spec.num_kv_heads, self.num_slots, *self.group)
        return torch.empty(shape, dtype=self.spec.dtype, device=device)

    def fitting(self, total: int, allocated: int) -> int:
        """Return the slots of a KV head that fit into a device of `total` bytes: those of all
        requests, in a tenth of vLLM's memory; if the user gave the number of pages, up to one for
        each of their groups, in what pages and `allocated` bytes leave."""
        slot_bytes = math.prod(self.group) * self.page_bytes // math.prod(self.shape[1:])
        usable = self.cache_config.gpu_memory_utilization * total
        count = min(self.num_slots, int(SLOTS_SHARE * usable / slot_bytes))
        pages = self.cache_config.num_gpu_blocks_override
        if pages:
            # Another tenth stays free for a step.
            spare = usable - SLOTS_SHARE * total - allocated - pages * self.device_page_bytes
            groups = pages * self.spec.block_size // self.spec.tokens_per_state
            count = max(count, min(groups, int(spare / slot_bytes)))
        return max(1, count)

    def make(self, cores: Tensor, kept: Tensor | None) -> HostTokens:
        """Return raw tokens for a cache of core tokens.

        Args:
            cores: [P, Hkv, E, 2 D].
            kept: Memory for the slots, as `slots` returns it.

        Raises:
            ValueError: they do not fit into the memory for them.
        """
        count, heads, entries, _ = cores.shape
        slots = None
        if kept is not None:
            slots = GroupSlots.make(kept, (count, entries, heads), clock_of(kept.device))
        if self.cache_config.num_gpu_blocks is None:
            # vLLM only measures the memory of captured steps: the same page stands for all.
            page = host_zeros((1, *self.shape), cores.dtype, cores.device)
            return HostTokens(page.expand(count, *self.shape), slots)
        if not self.is_checked:
            self._check(count)
        return HostTokens(host_zeros((count, *self.shape), cores.dtype, cores.device), slots)

    def _check(self, count: int) -> None:
        """Raise ValueError where the pages of all layers do not fit; else print their bytes."""
        available = available_bytes()
        if self.gib is not None:
            available = int(self.gib * 2**30)
        if available is not None and count * self.page_bytes > available:
            raise ValueError(
                f"raw tokens of {count} pages must fit in host memory, got {available / 2**30:.1f} "
                f"GiB for {count * self.page_bytes / 2**30:.1f}. Pass --num-gpu-blocks-override "
                f"{available // self.page_bytes}, or more by --additional-config "
                f"'{{\"{OPTION}\": GIB}}'."
            )
        self.is_checked = True
        _logger.info(
            "Core context: %d pages of %d tokens, %.2f GiB of raw tokens in host memory, %.2f GiB "
            "on the device, %d slots.",
            *(count, self.spec.block_size, count * self.page_bytes / 2**30),
            *(count * self.device_page_bytes / 2**30, self.num_slots),
        )
