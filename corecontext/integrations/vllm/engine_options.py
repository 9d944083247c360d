"""Refuse in one line options of vLLM's server that do not go with the caches of core context. Needs
vLLM."""

from __future__ import annotations

from vllm.config import VllmConfig

from corecontext.config import CCAConfig

CONNECTOR = "CoreContextConnector"
"""The name of the plug-in's connector, which offloads pages when they are complete."""


def num_drafts(vllm_config: VllmConfig) -> int:
    """Return the drafts of a step: tokens that it reads on trial and may reject."""
    speculation = vllm_config.speculative_config
    return 0 if speculation is None else speculation.num_speculative_tokens or 0


def check_server(vllm_config: VllmConfig, config: CCAConfig) -> None:
    """Check that the server's options go with two caches a layer.

    Args:
        config: Settings of the model.

    Raises:
        ValueError: says which option to change.
    """
    if vllm_config.kv_transfer_config is not None:
        _check_connector(vllm_config.kv_transfer_config.kv_connector, config)
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise ValueError(
            "the hybrid KV cache manager must be on for core context: window and core tokens have "
            "a table each. Leave out --disable-hybrid-kv-cache-manager."
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


def _check_connector(connector: str | None, config: CCAConfig) -> None:
    """Raise ValueError where vLLM would offload pages, or send them, that are not enough to go on
    from."""
    if not config.fetch_groups or config.fetches_from_host:
        kept = "raw tokens in host memory" if config.fetch_groups else "core tokens alone"
        raise ValueError(
            f"cca.store must be 'device' with fetch where vLLM offloads pages, got {kept}, which "
            "it would lose. Leave out --kv-transfer-config and --kv-offloading-size, or take the "
            "preset 'device'."
        )
    if connector != CONNECTOR:
        raise ValueError(
            f"kv_connector must be {CONNECTOR!r} with core context, got {connector!r}: others copy "
            "pages before they are complete. Change it by --kv-transfer-config, and leave out "
            "--kv-offloading-size."
        )
