"""Attend by vLLM's own FlashAttention where attention is plain causal: within whole prompts without
far past, and from prompts to all raw tokens in pages. One call takes several sequences. Needs
vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged.batch_parts import AttendWhole
from corecontext.ops.triton.paged.pages import Batch


class FlashAttention:
    """Attend by vLLM's FlashAttention (`AttendWhole`), whose programs are planned by the lengths on
    the device: to tokens in pages the first layer of a step plans for all.

    Args:
        version: Of FlashAttention.
        attend: vLLM's function of all versions.
        plan: That of plans, which version 3 takes.
    """

    def __init__(
        self, version: int, attend: Callable[..., Any], plan: Callable[..., Tensor]
    ) -> None:
        self.version = version
        self.attend = attend
        self.plan = plan
        self.planned: tuple[Batch | None, tuple[Any, ...], Tensor | None] = (None, (), None)
        """The newest batch that was planned for, what else the plan depends on, and the plan."""

    def __call__(
        self,
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
            if self.version == 3:
                keys["scheduler_metadata"] = self._plan_of(q, k, batch, spec.softcap is not None)
        self.attend(
            *(q, k, v),
            max_seqlen_q=batch.most_new,
            cu_seqlens_q=batch.starts,
            **keys,
            softmax_scale=spec.scale,
            causal=True,
            softcap=spec.softcap or 0.0,
            fa_version=self.version,
            out=out,
        )

    def _plan_of(self, q: Tensor, k: Tensor, batch: Batch, has_softcap: bool) -> Tensor | None:
        """Return the plan for pages k [P, E, Hkv, D]."""
        sizes = (q.shape, k.shape, has_softcap)
        of_batch, of_sizes, plan = self.planned
        if of_batch is not batch or of_sizes != sizes:
            plan = self.plan(
                batch_size=batch.lengths.shape[0],
                max_seqlen_q=batch.most_new,
                max_seqlen_k=batch.longest,
                num_heads_q=q.shape[1],
                num_heads_kv=k.shape[2],
                headdim=q.shape[2],
                cache_seqlens=batch.lengths,
                qkv_dtype=q.dtype,
                cu_seqlens_q=batch.starts,
                page_size=k.shape[1],
                causal=True,
                has_softcap=has_softcap,
            )
            self.planned = (batch, sizes, plan)
        return plan


def flash_attention(dtype: torch.dtype, head_size: int, device: torch.device) -> AttendWhole | None:
    """Return vLLM's FlashAttention, or None where it does not take such inputs or vLLM is built
    without it."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return None
    try:
        from vllm.v1.attention.backends import fa_utils
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

        functions = (fa_utils.flash_attn_varlen_func, fa_utils.get_scheduler_metadata)
    except (AttributeError, ImportError):
        return None
    version = fa_utils.get_flash_attn_version(head_size=head_size)
    if version is None or not FlashAttentionBackend.supports_head_size(head_size):
        return None
    return FlashAttention(version, *functions)
