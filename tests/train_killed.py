"""A training run that is killed twice, in different places, each time to be continued: python
train_killed.py CONFIG.

First when half of the optimizer's file is written in the second save, then when an old checkpoint
is being deleted. What a user would see after each, the names of the complete checkpoints, is
printed.
"""

import io
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path

import torch

import corecontext.train.trainer  # noqa: F401  what the copies would each import
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


def kill_twice(config: TrainConfig) -> list[list[str]]:
    """Run and kill copies of this process, which have its imports; return the names of the complete
    checkpoints after each."""
    found = []
    for place in ("optimizer.pt", "deletion"):
        if not (child := os.fork()):
            try:
                torch.set_num_threads(1)  # those of this process are not copied
                main(place, config)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        found.append([path.name for path in checkpoint.checkpoints(Path(config.output))])
    return found


if __name__ == "__main__":
    print(kill_twice(eval(sys.argv[1])))
