"""Training and fine-tuning with CCA attention on transformers' Trainer."""

from corecontext.train.config import TrainConfig

__all__ = ["TrainConfig"]
