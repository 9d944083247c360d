"""Register core context attention with vLLM, which calls `register` in each of its processes."""

from __future__ import annotations

import contextlib
import re
import warnings

# mutant vllm: an older release gets the plug-in
OLDEST = (0, 29)
"""First release of vLLM whose interfaces the plug-in has. In older ones methods that the caches
replace have other names, and pages would hold other tokens without an error."""
NEWEST = (0, 33)
"""Last release with which the tests have run."""
RELEASES = "vLLM 0.29 to 0.33"
OLDER = "vLLM 0.23 to 0.25"
OLDER_COMMIT = "7a5d12b0"
"""The last commit that takes them: check it out in a clone, and install from there."""


def release_of(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, or None of a build that has none, as "dev"."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def is_tested(version: str) -> bool:
    """Return whether the tests have run with a release of vLLM."""
    release = release_of(version)
    return release is not None and OLDEST <= release <= NEWEST


def register() -> None:
    """Register the backend CUSTOM and the caches of its layers; more than once has no further
    effect, and models without `--attention-backend CUSTOM` are as they were.

    An older release of vLLM, and a newer one without the interfaces, gets a warning and no backend,
    so that it serves other models. Any other newer release is left to the check at the start.
    """
    import vllm

    version = vllm.__version__
    release = release_of(version)
    if release is not None and release < OLDEST:
        _refuse(version, f"commit {OLDER_COMMIT} of corecontext takes {OLDER}")
        return
    try:
        _register()
    except (ImportError, AttributeError, TypeError, AssertionError) as error:
        if is_tested(version):
            raise
        _refuse(version, f"this newer release has other interfaces ({error})")


def _refuse(version: str, reason: str) -> None:
    """Warn that a release of vLLM goes on without core context."""
    warnings.warn(
        f"core context is not available in vLLM {version}: this version of corecontext takes "
        f"{RELEASES}, and {reason}",
        stacklevel=3,
    )


def _register() -> None:
    """Register the backend, the caches and the connector."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from corecontext.integrations.vllm.cache_managers import register_cache_specs

    path = "corecontext.integrations.vllm.paged_backend.CoreContextBackend"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    register_cache_specs()
    # A release without such a connector serves all the same.
    with contextlib.suppress(ImportError, AttributeError):
        from corecontext.integrations.vllm.offloading import register_connector

        register_connector()
