"""Prepare the published cells of compressed contexts that have no record yet."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from corecontext.files import UserError
from corecontext.record import read_records
from reproduction.published import Pending
from reproduction.real.material import Material
from reproduction.real.methods import Sizes
from reproduction.real.model import Protocol, RealModel
from reproduction.real.published import model_of
from reproduction.real.training import Adaptation
from reproduction.rivals.compare import PRESSED, Comparison, Questions, compare
from reproduction.rivals.plan import Row
from reproduction.rivals.tasks import Cell


def pending_rows(protocol: Protocol, rows: Sequence[Row]) -> list[Pending]:
    """Return the rows with cells that have no record in the output: of presses in kvpress's
    environment, of this package's caches in its own.

    Args:
        protocol: Model, data, folders and device; the rest is the rows'.
    """
    cells = PublishedCells(protocol)
    output = Path(protocol.output)
    records = read_records(output) if output.exists() else []
    has_kvpress = find_spec("kvpress") is not None
    pending = []
    elsewhere = 0
    for row in rows:
        missing = row.missing(records, cells.material.name)
        if not missing:
            continue
        if has_kvpress != (row.methods[-1] in PRESSED):
            elsewhere += 1
            continue
        command = cells.command(row, missing)
        seconds = partial(cells.seconds, row, missing)
        pending.append(Pending(command, seconds, partial(cells.measure, row, missing)))
    if elsewhere:
        needed = "without kvpress" if has_kvpress else "of kvpress"
        print(f"{elsewhere} rows are measured in the environment {needed}", file=sys.stderr)
    return pending


class PublishedCells:
    """Measurements of cells that share models and questions.

    Args:
        protocol: As of `pending_rows`.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.protocol = protocol
        self.material = Material(protocol.model, protocol.data, protocol.dtype, protocol.device)
        self.trained: dict[str, Material] = {}
        """Trained models by their folders."""
        self.questions: Questions = {}

    def command(self, row: Row, cells: Sequence[Cell]) -> str:
        """Return the command that measures cells of a row alone."""
        if row.trained is None:
            return row.command(self.protocol.model, cells)
        folder = f"DIR/{self._target(row).name}"
        options = ["--name", self.material.name, "--trained-by", row.trained.method]
        options += ["--trained-tokens", str(row.trained_tokens)]
        if row.trained_index is not None:
            options += ["--trained-index", row.trained_index]
        return row.command(folder, cells, options)

    def seconds(self, row: Row, cells: Sequence[Cell]) -> float:
        """Estimate the time of cells of a row from now on."""
        is_trained = row.trained is None or (self._target(row) / "config.json").exists()
        return row.seconds(len(cells), is_trained=is_trained)

    def measure(self, row: Row, cells: Sequence[Cell]) -> None:
        """Measure cells of a row, and append their records."""
        material = self._material(row)
        protocol = replace(self.protocol, model=material.folder, full_heads=row.full_heads)
        real = RealModel(protocol, Sizes(), Adaptation(), material)
        output = self.protocol.output
        comparison = Comparison(
            self.material.name,
            row.trained_by,
            row.trained_tokens,
            row.counts,
            output if row.counts.ruler else None,
            row.first_tokens,
            output,
            command=self.command(row, cells),
            trained_index=row.trained_index,
        )
        compare(real, comparison, cells, self.questions)

    def _material(self, row: Row) -> Material:
        """Return the model of a row, trained where no folder has it.

        Raises:
            UserError: it has to be trained first, in another environment or with a folder for it.
        """
        if row.trained is None:
            return self.material
        target = self._target(row)
        save = self.protocol.save
        if not (target / "config.json").exists():
            if save is None or row.methods[-1] in PRESSED:
                command = row.trained.command(self.protocol.model)
                raise UserError(
                    f"save must be the folder of a trained model, got {save}. Train it in the "
                    f"environment without kvpress: {command} --save DIR"
                )
            real = model_of(row.trained, self.protocol, self.material)
            real.train(row.trained.method, save)
        folder = str(target)
        if folder not in self.trained:
            protocol = self.protocol
            self.trained[folder] = Material(folder, protocol.data, protocol.dtype, protocol.device)
        return self.trained[folder]

    def _target(self, row: Row) -> Path:
        """Return the folder of a row's trained model."""
        real = model_of(row.trained, self.protocol, self.material)
        return real.target(row.trained.method, self.protocol.save or "DIR")
