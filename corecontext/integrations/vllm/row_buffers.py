"""Describe the new tokens of vLLM's steps one by one for fetch, in buffers that never move, as
captured steps need them. Needs vLLM."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from corecontext.ops.triton.paged.pages import Batch
from corecontext.ops.triton.paged.token_rows import Rows, write_rows


class RowBuffers:
    """Hold the rows of the newest step: a captured step is replayed with the same tensors.

    Args:
        full_until: Tokens of a prompt before this position see all tokens before them.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, full_until: int) -> None:
        scheduler = vllm_config.scheduler_config
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        most = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, captured)
        self.rows = torch.zeros(3, most, dtype=torch.int32, device=device)
        self.prompt_full_until = min(full_until, 2**30)
        """`full_until`, such that it fits in int32."""
        self.full_until = torch.zeros(most, dtype=torch.int32, device=device)
        """It for each sequence whose new tokens are those of a prompt, 0 for others."""
        self.has_prompts = False

    def write(self, common: CommonAttentionMetadata, batch: Batch) -> Rows:
        """Return the rows of a step; nothing waits for the device."""
        flags = common.is_prefilling
        has_prompts = flags is not None and bool(flags.any())
        if has_prompts or self.has_prompts:
            self.full_until.zero_()
        if has_prompts:
            positions = flags * self.prompt_full_until
            self.full_until[: len(flags)].copy_(positions, non_blocking=True)
        self.has_prompts = has_prompts
        full_until = self.full_until[: batch.lengths.shape[0]]
        return write_rows(batch, full_until, common.num_actual_tokens, self.rows)
