"""Train and fine-tune with CCA attention: options, data order, loss, checkpoints."""

from corecontext.train.train_config import TrainConfig

__all__ = ["TrainConfig"]
