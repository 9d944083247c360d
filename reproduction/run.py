"""Run the pending stages of a reproduction; each leaves its records in a file of its own.

Stages exchange nothing but files, so several processes, each with a GPU of its own, can share a
work folder: each takes a stage that no other process is running.
"""

import json
import math
import os
import time
import traceback
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import torch

from corecontext.files import UserError, alone_in, atomic_path, make_folder
from corecontext.record import Record, append_records, read_records
from corecontext.terminal import console
from reproduction.methods import methods
from reproduction.plan import Stage, stages
from reproduction.sizes import Size
from reproduction.stages import KINDS
from reproduction.texts import Corpus
from reproduction.training_loop import OutOfTime
from reproduction.workspace import RECORDS, Workspace

WORTH_STARTING_S = 20.0
LOOK_AGAIN_S = 1.0  # while other processes run all stages that could be run


class Miniature:
    """One reproduction in a work folder.

    Args:
        folder: The work folder; one of another size or other data is refused.
        size: How large.
        data: Folder with texts, tokenizer and questions, or None for the bundled document.
        device: "cuda" or "cpu".
        finalists: More methods to run with every seed.
        minutes: Time of this invocation; an unfinished training is saved and goes on in the next.
        json_path: File that records are appended to, too.
    """

    def __init__(
        self,
        folder: str | Path,
        size: Size,
        data: str | None,
        device: str,
        *,
        finalists: tuple[str, ...] = (),
        minutes: float = math.inf,
        json_path: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.size = size
        self.plan = stages(size, finalists)
        self.json_path = json_path
        self.end = time.monotonic() + 60 * minutes
        workers = max(1, min(12, (os.cpu_count() or 2) - 2))
        if size.name == "smoke":
            workers = 0
        corpus = Corpus(folder, data)
        self.work = Workspace(self.folder, size, corpus, device, workers, self.time_left)
        self._claim({"size": size.name, "data": corpus.identity()})

    def _claim(self, run: dict[str, Any]) -> None:
        """Take the folder, unless it belongs to another run."""
        make_folder(self.folder)
        path = self.folder / "run.json"
        if path.exists():
            owner = json.loads(path.read_text(encoding="utf-8"))
            if owner != run:
                raise UserError(
                    f"out '{self.folder}' must be a folder of this run, got one of {owner}. "
                    "Choose another."
                )
        elif any(self.folder.iterdir()):
            raise UserError(
                f"out '{self.folder}' must be empty or hold an earlier run, got other files."
            )
        else:
            path.write_text(json.dumps(run) + "\n", encoding="utf-8")

    def time_left(self) -> float:
        """Return the seconds left to this invocation."""
        return self.end - time.monotonic()

    def is_done(self, name: str) -> bool:
        """Whether a stage has left its records, and "prepare" its tokens, which may be removed."""
        done = (self.folder / name / RECORDS).exists()
        return done and (name != "prepare" or self.work.corpus.is_prepared())

    def is_all_done(self, only: Sequence[str] = ()) -> bool:
        """Whether `run` would have nothing to do."""
        return not self._pending(only)

    def _pending(self, only: Sequence[str]) -> list[Stage]:
        """Return the pending stages in order, optionally only some and their dependencies."""
        by_name = {stage.name: stage for stage in self.plan}
        for name in only:
            if name not in by_name:
                raise UserError(f"stage must be one of {', '.join(by_name)}, got {name!r}.")
        wanted = set(only or by_name)
        while more := {need for name in wanted for need in by_name[name].needs} - wanted:
            wanted |= more
        return [
            stage for stage in self.plan if stage.name in wanted and not self.is_done(stage.name)
        ]

    def run(self, only: Sequence[str] = ()) -> bool:
        """Run the pending stages, optionally only some and their dependencies.

        Stages that another process is running are waited for. A stage that fails keeps only those
        waiting that depend on it.

        Returns:
            Whether all of them are done now; False where the time is over.

        Raises:
            UserError: no such stage.
            Exception: that of the first failed stage, once no other stage is left.
        """
        failed: dict[str, Exception] = {}
        while True:
            pending = [s for s in self._pending(only) if not self._is_lost(s, failed)]
            if not pending:
                break
            if self.time_left() < WORTH_STARTING_S and math.isfinite(self.end):
                return False
            ready = [stage for stage in pending if all(map(self.is_done, stage.needs))]
            if not any(self._run_alone(stage, failed, len(pending)) for stage in ready):
                time.sleep(LOOK_AGAIN_S)
        for error in failed.values():
            raise error
        return True

    def _run_alone(self, stage: Stage, failed: dict[str, Exception], pending: int) -> bool:
        """Run a stage unless another process does; returns whether this process did."""
        folder = self.folder / stage.name
        folder.mkdir(exist_ok=True)
        with alone_in(folder) as alone:
            if not alone or self.is_done(stage.name):
                return False
            console().print(f"{stage.name} ({pending} to go)")
            try:
                self._finish(stage)
            except OutOfTime:
                pass  # what was trained is kept, and `run` sees that the time is over
            except Exception as error:
                failed[stage.name] = error
                console().print(f"{stage.name} failed: {error}")
                if not isinstance(error, UserError):
                    traceback.print_exc()
                if self.work.device.startswith("cuda"):
                    torch.cuda.synchronize()  # raises where the GPU is unusable for this process
        return True

    def _is_lost(self, stage: Stage, failed: Container[str]) -> bool:
        """Whether a stage, or one that it depends on, has failed."""
        if stage.name in failed:
            return True
        needs = [need for need in self.plan if need.name in stage.needs]
        return any(not self.is_done(need.name) and self._is_lost(need, failed) for need in needs)

    def _finish(self, stage: Stage) -> None:
        """Run one stage to its end and write its records.

        Raises:
            OutOfTime: the invocation's time is over; the training so far is kept.
        """
        records = list(KINDS[stage.kind](self.work, stage))
        with atomic_path(self.folder / stage.name / RECORDS) as name:
            text = "".join(record.to_json() + "\n" for record in records)
            Path(name).write_text(text, encoding="utf-8")
        if self.json_path is not None:
            append_records(self.json_path, records)
        (self.folder / stage.name / "state.pt").unlink(missing_ok=True)

    def records(self) -> list[Record]:
        """Return the records of all stages that are done, of other invocations' finalists, too."""
        adaptable = tuple(name for name, method in methods(self.size).items() if method.trains)
        return [
            record
            for stage in stages(self.size, adaptable)
            if self.is_done(stage.name)
            for record in read_records(self.folder / stage.name / RECORDS)
        ]
