"""Refuse in one line options of vLLM's server that do not go with the caches of core context. Needs
vLLM."""

from __future__ import annotations

from vllm.config import VllmConfig


def num_drafts(vllm_config: VllmConfig) -> int:
    """Return the drafts of a step: tokens that it reads on trial and may reject."""
    speculation = vllm_config.speculative_config
    return 0 if speculation is None else speculation.num_speculative_tokens or 0


def check_server(vllm_config: VllmConfig) -> None:
    """Check that the server's options go with two caches a layer.

    Raises:
        ValueError: says which option to change.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError(
            "the hybrid KV cache manager must be on for core context: window and core tokens have "
            "a table each. Leave out --disable-hybrid-kv-cache-manager."
        )
    if vllm_config.kv_transfer_config is not None:
        raise ValueError(
            "kv_transfer_config must not be given with core context: its caches are not sent to "
            "other servers. Leave out --kv-transfer-config."
        )
    parallel = vllm_config.parallel_config
    for option in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, option) > 1:
            raise ValueError(
                f"{option} must be 1 for core context, got {getattr(parallel, option)}: its pages "
                "are not split by tokens. Use --tensor-parallel-size."
            )
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method != "ngram":
        raise ValueError(
            f"speculative method must be 'ngram' with core context, got {speculation.method!r}: a "
            "draft model would need caches of its own. Use --speculative-config with it."
        )
