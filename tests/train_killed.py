"""A training run that kills itself at a given place: python train_killed.py WHERE "TrainConfig(...)".

WHERE is the name of a checkpoint's file, killed when half of it is written in the second save; or "deletion", killed
when an old checkpoint is about to be deleted.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys

import torch

from corecontext.train import TrainConfig, checkpoint
from corecontext.train.run import train


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(where: str, config: TrainConfig) -> None:
    save, remove, saves = torch.save, shutil.rmtree, []

    def half_saved(value, target, *args, **kwargs):
        if str(target).endswith(where):
            saves.append(target)
            if len(saves) == 2:
                whole = io.BytesIO()
                save(value, whole)
                with open(target, "wb") as file:
                    file.write(whole.getvalue()[:len(whole.getvalue()) // 2])
                    file.flush()
                    die()
        save(value, target, *args, **kwargs)

    def half_removed(path, *args, **kwargs):
        if os.path.basename(path) == checkpoint.DOOMED and os.path.isdir(path):
            os.unlink(os.path.join(path, "trainer_state.json"))
            die()
        remove(path, *args, **kwargs)

    torch.save = half_saved
    if where == "deletion":
        shutil.rmtree = half_removed
    train(config)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], eval(sys.argv[2]))
