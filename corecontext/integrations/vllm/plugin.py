"""Register core context attention with vLLM, which calls `register` in each of its processes."""

from __future__ import annotations

import warnings


def register() -> None:
    """Register the backend CUSTOM and the caches of its layers; more than once has no further
    effect, and models without `--attention-backend CUSTOM` are as they were.

    A vLLM with other interfaces gets a warning and no backend, so that it serves other models.
    """
    import vllm

    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        from corecontext.integrations.vllm.cache_managers import register_cache_specs
    except ImportError as error:
        warnings.warn(
            f"core context is not available in vLLM {vllm.__version__}, whose interfaces are not "
            f"those of 0.23: {error}. Install vllm==0.23.0 to serve models with it.",
            stacklevel=2,
        )
        return
    path = "corecontext.integrations.vllm.paged_backend.CoreContextBackend"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    register_cache_specs()
