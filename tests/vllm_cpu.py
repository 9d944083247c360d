"""vLLM's CPU platform, on which a plug-in attends by kernels in Triton's interpreter."""

import faster_interpreter
from vllm.platforms.cpu import CpuPlatform

faster_interpreter.install()


class Interpreted(CpuPlatform):
    """Let a plug-in attend, and hybrid caches be."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return selected_backend.get_path()

    @classmethod
    def support_hybrid_kv_cache(cls):
        return True


def platform() -> str:
    """Name the platform, as the entry point of a plug-in."""
    return f"{__name__}.Interpreted"
