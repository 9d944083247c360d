"""Register core context attention with vLLM, which calls `register` in each of its processes."""

from __future__ import annotations

import warnings

# mutant vllm: an untested release gets the plug-in
VERSIONS = ("0.23", "0.24", "0.25")
"""Releases of vLLM with which the tests pass. In others, methods that the caches replace may have
other names, and their pages would hold other tokens without an error."""


def register() -> None:
    """Register the backend CUSTOM and the caches of its layers; more than once has no further
    effect, and models without `--attention-backend CUSTOM` are as they were.

    Another release of vLLM gets a warning and no backend, so that it serves other models.
    """
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) not in VERSIONS:
        warnings.warn(
            f"core context is not available in vLLM {vllm.__version__}, only in "
            f"{', '.join(VERSIONS)}. Install one of them to serve models with it.",
            stacklevel=2,
        )
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from corecontext.integrations.vllm.cache_managers import register_cache_specs

    path = "corecontext.integrations.vllm.paged_backend.CoreContextBackend"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    register_cache_specs()
