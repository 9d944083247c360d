"""Describe the new tokens of vLLM's steps one by one for fetch, where captured steps read them.
Needs vLLM."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from corecontext.ops.triton.paged.pages import Batch
from corecontext.ops.triton.paged.token_rows import Rows, write_rows


class RowBuffers:
    """Hold the rows of the newest step: a captured step is replayed with the same tensors."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        scheduler = vllm_config.scheduler_config
        captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        most = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, captured)
        self.rows = torch.zeros(3, most, dtype=torch.int32, device=device)
        self.exact = torch.zeros(most, dtype=torch.int32, device=device)
        """1 for sequences whose new tokens are those of a prompt."""
        self.has_exact = False

    def write(self, common: CommonAttentionMetadata, batch: Batch) -> Rows:
        """Return the rows of a step; nothing waits for the device."""
        flags = common.is_prefilling
        has_exact = flags is not None and bool(flags.any())
        if has_exact or self.has_exact:
            self.exact.zero_()
        if has_exact:
            self.exact[: len(flags)].copy_(flags, non_blocking=True)
        self.has_exact = has_exact
        exact = self.exact[: batch.lengths.shape[0]]
        return write_rows(batch, exact, common.num_actual_tokens, self.rows)
