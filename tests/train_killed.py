"""A training run that is killed twice, in different places, each time to be continued: python
train_killed.py CONFIG.

First when half of the optimizer's file is written in the second save, then when an old checkpoint
is being deleted. What a user would see after each, the names of the complete checkpoints, is
printed.
"""

import gc
import io
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

import corecontext.train.trainer  # noqa: F401  what the processes below would each import
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
                    file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
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
    gc.freeze()  # the children's collections skip what is imported
    settings = eval(sys.argv[1])
    for place in ("optimizer.pt", "deletion"):
        if not (
            child := os.fork()
        ):  # a process of its own, without the seconds that its imports would take
            main(place, settings)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        print(*(path.name for path in checkpoint.checkpoints(Path(settings.output))))
