"""Attend by vLLM's own FlashAttention where attention is plain causal: within whole prompts without
far past, and from prompts to all raw tokens in pages. One call takes several sequences. Needs
vLLM."""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged.batch_parts import AttendWhole
from corecontext.ops.triton.paged.pages import Batch


def flash_attention(dtype: torch.dtype, head_size: int, device: torch.device) -> AttendWhole | None:
    """Return vLLM's FlashAttention, or None where it does not take such inputs or vLLM is built
    without it."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    try:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    except ImportError:
        return None
    version = get_flash_attn_version(head_size=head_size)
    if version is None or not FlashAttentionBackend.supports_head_size(head_size):
        return None

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: Batch,
        spec: Spec,
        out: Tensor,
        table: Tensor | None = None,
    ) -> None:
        if table is None:
            keys = {"max_seqlen_k": batch.most_new, "cu_seqlens_k": batch.starts}
        else:
            keys = {"max_seqlen_k": batch.longest, "seqused_k": batch.lengths}
            keys["block_table"] = table
        flash_attn_varlen_func(
            *(q, k, v),
            max_seqlen_q=batch.most_new,
            cu_seqlens_q=batch.starts,
            **keys,
            softmax_scale=spec.scale,
            causal=True,
            softcap=spec.softcap or 0.0,
            fa_version=version,
            out=out,
        )

    return attend
