"""Training and fine-tuning with CCA attention on transformers' Trainer."""

from corecontext.train.train_config import TrainConfig

__all__ = ["TrainConfig"]
