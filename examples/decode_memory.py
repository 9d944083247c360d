"""Print how the cache grows with the prompt, under full attention and CCA.

python examples/decode_memory.py [--model DIR] [--lengths 1024 2048 ...]
"""

import argparse
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import corecontext
from corecontext.inference import prefill
from corecontext.integrations.hf.cache_layers import cache_bytes


def cached_bytes(model: torch.nn.Module, length: int) -> int:
    """Return the cache size after a prompt of `length` random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    return cache_bytes(prefill(model, ids).cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    assets = Path(str(files("corecontext"))) / "assets"
    parser.add_argument("--model", default=str(assets / "demo_model"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    config = corecontext.CCAConfig.pooling(window_size=512)
    print(f"{'tokens':>8} {'full':>12} {'CCA':>12}   bytes")
    for length in options.lengths:
        full = cached_bytes(model, length)
        with corecontext.enabled(model, config):
            compact = cached_bytes(model, length)
        print(f"{length:8} {full:12} {compact:12}   {full / compact:.1f}x less")


if __name__ == "__main__":
    main()
