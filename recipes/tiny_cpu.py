"""A small model from scratch on the bundled document, in seconds on a CPU: shows the whole way, and
CI walks it.

corecontext train recipes/tiny_cpu.py --output runs/tiny_cpu
"""

from pathlib import Path

import corecontext
from corecontext.train import TrainConfig

ASSETS = Path(corecontext.__file__).parent / "assets"
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def tiny_cpu() -> TrainConfig:
    """2 layers, 512 bytes of context, a window of 64: most of what is seen is core tokens."""
    document = str(ASSETS / "document.txt")
    return TrainConfig.preset(
        "pooling",
        model=str(ASSETS / "demo_model"),
        strategy="scratch",
        shape=SHAPE,
        data=(document,),
        eval_data=(document,),
        context_length=512,
        group_size=16,
        window_size=64,
        batch_size=2,
        steps=24,
        learning_rate=1e-2,
        min_learning_rate=1e-3,
        warmup_steps=2,
        checkpointing=False,
        save_every=12,
    )
