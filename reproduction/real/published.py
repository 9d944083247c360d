"""Prepare the published rows of a pretrained model that have no record yet."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from corecontext.record import read_records
from reproduction.published import Pending
from reproduction.real.material import Material
from reproduction.real.model import Protocol, RealModel
from reproduction.real.plan import Row


def pending_rows(protocol: Protocol, rows: Sequence[Row]) -> list[Pending]:
    """Return the rows without a record of the same params in the output. All share the model, its
    texts and the teacher, which are made when a row first needs them.

    Args:
        protocol: Model, data, folders and device; the rest is the rows'.
    """
    material = Material(protocol.model, protocol.data, protocol.dtype, protocol.device)
    output = Path(protocol.output)
    records = read_records(output) if output.exists() else []
    pending = []
    for row in rows:
        command = row.command(protocol.model)
        real = model_of(row, replace(protocol, command=command), material)
        if not real.is_published(row.method, records):
            seconds = partial(_seconds, row, real)
            pending.append(Pending(command, seconds, partial(real.measure, row.method)))
    return pending


def model_of(row: Row, protocol: Protocol, material: Material) -> RealModel:
    """Return the measurements of a row."""
    of_row = replace(
        protocol,
        windows=row.windows,
        needles=row.needles,
        needle_lengths=row.needle_lengths,
        lists=row.lists,
        full_heads=row.full_heads,
        head_needles=row.head_needles,
        next_tokens=row.next_tokens,
    )
    return RealModel(of_row, row.sizes, row.adaptation, material)


def _seconds(row: Row, real: RealModel) -> float:
    """Estimate a row's time from now on."""
    return row.seconds(is_trained=real.is_trained(row.method))
