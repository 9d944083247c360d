"""vLLM's functions that plan caches, which have a module of their own since 0.33, and the fields of
vLLM's config that they read."""

from types import SimpleNamespace

from vllm.v1.kv_cache_layout import KVCacheLayout

try:
    from vllm.v1.core.kv_cache_planning import (
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

__all__ = ["get_kv_cache_config_from_groups", "get_kv_cache_groups", "planning_config"]


def planning_config(page_size: int = 16) -> SimpleNamespace:
    """A config of vLLM's whose caches are planned; the whole one needs a device of vLLM's."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=page_size,
            gpu_memory_utilization=0.9,
            enable_prefix_caching=True,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
            hash_block_size=None,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            prefix_match_unit=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            tensor_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=False, max_num_batched_tokens=64, max_num_seqs=8
        ),
        speculative_config=None,
    )
