"""Training's table and figure: tokens per second, memory and scaling, from the records of one
device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks.training import DEFAULT, OURS
from corecontext.drawing import CCA, FLOOR, FULL, pyplot, save
from corecontext.record import Record, latest
from corecontext.terminal import console


@dataclass(frozen=True)
class Step:
    """One length: CCA's step, and the best full attention's where there is one."""

    length: int
    gpus: int
    fsdp: bool
    """Whether weights and sequence were spread over the GPUs."""
    fuse: bool
    """Whether norms, MLPs and the rotation were compiled."""
    cca: Record
    cca_bytes: float
    full: Record | None
    full_bytes: float | None
    efficiency: float | None
    """Operations per second and GPU, against one process with as many tokens: a longer sequence has
    more attention to compute per token, so tokens per second alone would not compare."""
    received: Record | None
    default: Record | None
    """With heads that keep every token and a teacher, as `corecontext train` does where no recipe
    is named."""

    @property
    def speedup(self) -> float | None:
        """Tokens per second, CCA over full attention."""
        return None if self.full is None else self.cca.value / self.full.value

    @property
    def allowed(self) -> float | None:
        """The speedup that the numbers of operations allow."""
        return (
            None
            if self.full is None
            else self.full.params["step_flops"] / self.cca.params["step_flops"]
        )


def steps(records: Sequence[Record]) -> list[Step]:
    """What was measured on the device and with the shape of the last record; by how it was run,
    GPUs and length."""
    last = next(r for r in reversed(records) if r.name == "training.tokens_per_s")
    records = [
        r
        for r in records
        if r.name.startswith("training.")
        and (r.device, r.params["shape"]) == (last.device, last.params["shape"])
    ]
    rates = [r for r in records if r.name == "training.tokens_per_s"]
    found = []
    for fsdp, fuse, gpus, length in sorted(
        {
            (r.params["fsdp"], r.params["fuse"], r.params["gpus"], r.params["length"])
            for r in rates
            if r.params["method"] == "cca"
        }
    ):
        here = {"gpus": gpus, "length": length, "fsdp": fsdp, "fuse": fuse}

        def newest(name: str, method: str, here: dict[str, Any] = here) -> Record | None:
            return latest(records, f"training.{name}", method=method, **here)

        full = [
            one
            for method in sorted({r.params["method"] for r in rates} - set(OURS))
            if (one := newest("tokens_per_s", method)) is not None
        ]
        best = max(full, key=lambda r: r.value, default=None)
        ours, ours_bytes = newest("tokens_per_s", "cca"), newest("peak_bytes", "cca")
        theirs_bytes = None if best is None else newest("peak_bytes", best.params["method"])
        assert ours is not None and ours_bytes is not None  # recorded together
        tokens = ours.params["tokens_per_gpu"]
        alone = (
            newest("tokens_per_s", "cca", {**here, "gpus": 1, "length": tokens})
            if gpus > 1
            else None
        )
        found.append(
            Step(
                length,
                gpus,
                fsdp,
                fuse,
                ours,
                ours_bytes.value,
                best,
                None if theirs_bytes is None else theirs_bytes.value,
                None if alone is None else _rate(ours) / _rate(alone),
                newest("received_bytes", "cca"),
                newest("tokens_per_s", DEFAULT),
            )
        )
    return found


def _rate(record: Record) -> float:
    """Operations per second and GPU."""
    return (
        record.value / record.params["length"] * record.params["step_flops"] / record.params["gpus"]
    )


COLUMNS = (
    "length",
    "GPUs",
    "full attention, tokens/s",
    "CCA, tokens/s",
    "",
    "of allowed",
    "the default, tokens/s",
    "full attention, GiB",
    "CCA, GiB",
    "scaling",
    "received, of ring attention",
)


def _cells(one: Step) -> tuple[str, ...]:
    """A row of the table."""
    best = "" if one.full is None else f"{one.full.value:.0f} ({one.full.params['backend']})"
    ratio = "" if one.speedup is None else f"{one.speedup:.2f}x"
    share = "" if one.speedup is None or one.allowed is None else f"{one.speedup / one.allowed:.0%}"
    ring = (
        ""
        if one.received is None or not one.received.params["ring_bytes"]
        else f"1/{one.received.params['ring_bytes'] / max(1, one.received.value):.1f}"
    )
    run = f"{one.gpus}{', FSDP2' if one.fsdp else ''}{', compiled' if one.fuse else ''}"
    return (
        str(one.length),
        run,
        best,
        f"{one.cca.value:.0f}",
        ratio,
        share,
        "" if one.default is None else f"{one.default.value:.0f}",
        "" if one.full_bytes is None else f"{one.full_bytes / 2**30:.1f}",
        f"{one.cca_bytes / 2**30:.1f}",
        "" if one.efficiency is None else f"{one.efficiency:.0%}",
        ring,
    )


def _title(found: Sequence[Step]) -> str:
    params = found[0].cca.params
    return (
        f"{params['shape']}, {params['dtype']}, g = {params['group_size']}, s = {params['window_size']}: "
        f"{found[0].cca.device}"
    )


def print_training(records: Sequence[Record]) -> None:
    """The table on standard output."""
    if not any(r.name == "training.tokens_per_s" for r in records):
        return
    found = steps(records)
    table = Table(
        title=_title(found),
        box=SIMPLE_HEAD,
        caption="allowed: the speedup that the numbers of operations allow",
    )
    for column in COLUMNS:
        table.add_column(column.replace(", ", "\n", 1), justify="right")
    for one in found:
        table.add_row(*_cells(one))
    console().print(table)


def training_markdown(records: Sequence[Record]) -> str:
    """The table of docs/training.md."""
    found = steps(records)
    lines = [f"{_title(found)}.", "", f"| {' | '.join(COLUMNS)} |", "|" + "---:|" * len(COLUMNS)]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(one))} |" for one in found)]) + "\n"


def draw_training(records: Sequence[Record], path: str) -> None:
    """Tokens per second and memory by length on one GPU, and the efficiency by number of GPUs where
    there is one."""
    found = steps(records)
    alone = [one for one in found if not one.fsdp]
    alone = [one for one in alone if one.fuse == alone[-1].fuse]  # compiled where there is both
    many = [one for one in found if one.efficiency is not None]
    panels = 2 * bool(alone) + bool(many)
    if not panels:
        return
    figure, axes = pyplot().subplots(
        1, panels, figsize=(3.6 * panels, 3.2), squeeze=False, layout="constrained"
    )
    rest = list(axes[0])
    if alone:
        rates, memory = rest.pop(0), rest.pop(0)
        pairs = [one for one in alone if one.full is not None]
        lengths, compared = [one.length for one in alone], [one.length for one in pairs]
        best = [one.full.value for one in pairs if one.full]
        for axis, cca, full in (
            (rates, [one.cca.value for one in alone], best),
            (
                memory,
                [one.cca_bytes / 2**30 for one in alone],
                [(one.full_bytes or 0) / 2**30 for one in pairs],
            ),
        ):
            axis.plot(compared, full, "-o", color=FULL, markersize=3, label="full attention")
            axis.plot(lengths, cca, "-o", color=CCA, markersize=3, label="CCA")
            axis.set_xscale("log", base=2)
            axis.set_xlabel("length", fontsize=8)
        rates.plot(
            compared,
            [value * (one.allowed or 0) for value, one in zip(best, pairs)],
            "--",
            color=FLOOR,
            label="CCA at full attention's operations per second",
        )
        rates.set_ylim(0, None)
        rates.set_title("tokens per second of a training step", fontsize=9)
        memory.set_title("peak memory, GiB", fontsize=9)
        rates.legend(fontsize=6)
    if many:
        axis = rest.pop(0)
        axis.plot(
            [one.gpus for one in many],
            [100 * (one.efficiency or 0) for one in many],
            "-o",
            color=CCA,
            markersize=3,
        )
        axis.set_ylim(0, 110)
        axis.set_xlabel("GPUs on one sequence", fontsize=8)
        axis.set_title(
            f"weak scaling, %, {many[0].cca.params['tokens_per_gpu']} tokens each", fontsize=9
        )
    for axis in axes[0]:
        axis.tick_params(labelsize=7)
    figure.suptitle(_title(found), fontsize=8)
    save(figure, path)
