"""Pretrained models with CCA attention at long contexts, as the paper trained them (appendix B).

On 8 GPUs, one row each, 8 accumulated, 1,000 steps: 2.1 billion tokens at 32K, 5.2 at 80K. g = 16,
s = 1024; LLaMA-2's rotary base goes from 10,000 to 500,000, the others keep theirs, which already
reach 128K. The paper's data is SlimPajama with per-source length upsampling; give it, or your own
text of long documents, with --data. The paper states no learning rate: 2e-5, the default, is what
its sources for context extension use.

    torchrun --nproc-per-node 8 -m corecontext train recipes/long_context.py:llama2_7b_32k \
        --data DIR --output runs/llama2_7b_32k
"""

from corecontext.train import TrainConfig

_PAPER = TrainConfig.preset(
    "paper",
    strategy="full",
    steps=1000,
    batch_size=1,
    accumulation=8,
    learning_rate=2e-5,
    warmup_steps=20,
    fsdp=True,
    workers=16,
    source_field="meta.redpajama_set_name",
    long_tokens=4096,
)


def llama2_7b_32k() -> TrainConfig:
    """LLaMA-2 7B, from 4K to 32K tokens."""
    return _PAPER.replace(
        model="meta-llama/Llama-2-7b-hf", context_length=32_768, rope_theta=500_000.0
    )


def llama2_7b_80k() -> TrainConfig:
    """LLaMA-2 7B, from 4K to 80K tokens."""
    return _PAPER.replace(
        model="meta-llama/Llama-2-7b-hf", context_length=81_920, rope_theta=500_000.0
    )


def llama31_8b_128k() -> TrainConfig:
    """LLaMA-3.1 8B Instruct at its own 128K tokens."""
    return _PAPER.replace(model="meta-llama/Llama-3.1-8B-Instruct", context_length=131_072)


def qwen25_7b_128k() -> TrainConfig:
    """Qwen2.5 7B at its own 128K tokens."""
    return _PAPER.replace(model="Qwen/Qwen2.5-7B", context_length=131_072)
