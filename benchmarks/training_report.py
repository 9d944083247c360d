"""Report training steps from the records of one device: table and figure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.drawing import CCA, FLOOR, FULL, pyplot, save
from benchmarks.plotting import draw_line, finish
from benchmarks.tables import (
    Column,
    markdown,
    optional,
    shown_percent,
    shown_times,
    shown_tokens,
)
from corecontext.record import Record, latest

DEFAULT = "cca_default"
"""KV heads that keep every token, and a teacher: a recipe of earlier records."""
OURS = ("cca", "cca_raw", DEFAULT)


@dataclass(frozen=True)
class Step:
    """One length: CCA's step, and the best full attention's where it was measured."""

    length: int
    gpus: int
    fsdp: bool
    """Whether weights and sequence were split over the GPUs."""
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
    """CCA with raw heads and a teacher."""

    @property
    def speedup(self) -> float | None:
        """Tokens per second, CCA over full attention."""
        return None if self.full is None else self.cca.value / self.full.value

    @property
    def allowed(self) -> float | None:
        """The speedup that the numbers of operations allow."""
        if self.full is None:
            return None
        return self.full.params["step_flops"] / self.cca.params["step_flops"]

    @property
    def of_allowed(self) -> float | None:
        """The share of the allowed speedup that is reached."""
        if self.speedup is None or self.allowed is None:
            return None
        return self.speedup / self.allowed

    @property
    def ring_share(self) -> float | None:
        """Bytes that ring attention would receive over those received."""
        if self.received is None or not self.received.params["ring_bytes"]:
            return None
        return self.received.params["ring_bytes"] / max(1, self.received.value)


def steps(records: Sequence[Record]) -> list[Step]:
    """Return the steps on the last record's device and shape, by kind of run, GPUs and length."""
    last = next(r for r in reversed(records) if r.name == "training.tokens_per_s")
    records = [
        r
        for r in records
        if r.name.startswith("training.")
        and (r.device, r.params["shape"]) == (last.device, last.params["shape"])
    ]
    runs = {
        (r.params["fsdp"], r.params["fuse"], r.params["gpus"], r.params["length"])
        for r in records
        if r.name == "training.tokens_per_s" and r.params["method"] == "cca"
    }
    return [_step(records, *run) for run in sorted(runs)]


def _step(records: Sequence[Record], fsdp: bool, fuse: bool, gpus: int, length: int) -> Step:
    run = {"gpus": gpus, "length": length, "fsdp": fsdp, "fuse": fuse}

    def newest(name: str, method: str, **changes: Any) -> Record | None:
        return latest(records, f"training.{name}", method=method, **run | changes)

    methods = {r.params["method"] for r in records if r.name == "training.tokens_per_s"}
    rates = [newest("tokens_per_s", method) for method in sorted(methods - set(OURS))]
    full = max((r for r in rates if r is not None), key=lambda r: r.value, default=None)
    full_bytes = newest("peak_bytes", full.params["method"]) if full else None
    cca = newest("tokens_per_s", "cca")
    cca_bytes = newest("peak_bytes", "cca")
    assert cca is not None and cca_bytes is not None  # recorded together
    alone = None
    if gpus > 1:
        alone = newest("tokens_per_s", "cca", gpus=1, length=cca.params["tokens_per_gpu"])
    return Step(
        length,
        gpus,
        fsdp,
        fuse,
        cca,
        cca_bytes.value,
        full,
        full_bytes.value if full_bytes else None,
        _rate(cca) / _rate(alone) if alone else None,
        newest("received_bytes", "cca"),
        newest("tokens_per_s", DEFAULT),
    )


def _rate(record: Record) -> float:
    """Return operations per second and GPU."""
    p = record.params
    return record.value / p["length"] * p["step_flops"] / p["gpus"]


def _run(step: Step) -> str:
    """Show how a step was run."""
    return f"{step.gpus}{', FSDP2' if step.fsdp else ''}{', compiled' if step.fuse else ''}"


def _best_full(step: Step) -> str:
    """Show the best full attention and its kernel."""
    return f"{step.full.value:.0f} ({step.full.params['backend']})" if step.full else ""


percent = optional(shown_percent)
gib = optional(lambda value: f"{value / 2**30:.1f}")
COLUMNS = (
    Column("length", lambda step: str(step.length)),
    Column("GPUs", _run),
    Column("full attention, tokens/s", _best_full),
    Column("CCA, tokens/s", lambda step: f"{step.cca.value:.0f}"),
    Column("", lambda step: optional(shown_times)(step.speedup)),
    Column("of allowed", lambda step: percent(step.of_allowed)),
    Column(
        "raw heads and teacher, tokens/s",
        lambda step: f"{step.default.value:.0f}" if step.default else "",
    ),
    Column("full attention, GiB", lambda step: gib(step.full_bytes)),
    Column("CCA, GiB", lambda step: gib(step.cca_bytes)),
    Column("scaling", lambda step: percent(step.efficiency)),
    Column(
        "received, of ring attention", lambda step: optional("1/{:.1f}".format)(step.ring_share)
    ),
)


def _title(measured: Sequence[Step]) -> str:
    cca = measured[0].cca
    p = cca.params
    config = f"g = {p['group_size']}, s = {p['window_size']}"
    return f"{p['shape']}, {p['dtype']}, {config}: {cca.device}"


def training_markdown(records: Sequence[Record]) -> str:
    """Return the table of docs/training.md."""
    measured = steps(records)
    return "\n".join([f"{_title(measured)}.", "", *markdown(COLUMNS, measured)]) + "\n"


def draw_training(records: Sequence[Record], path: str) -> None:
    """Draw tokens per second and memory by length on one GPU, and the efficiency by number of GPUs
    where several were measured."""
    measured = steps(records)
    alone = [step for step in measured if not step.fsdp]
    alone = [step for step in alone if step.fuse == alone[-1].fuse]  # compiled where both are
    many = [step for step in measured if step.efficiency is not None]
    panels = 2 * bool(alone) + bool(many)
    if not panels:
        return
    figure, axes = pyplot().subplots(
        1, panels, figsize=(4.6 * panels, 3.2), squeeze=False, layout="constrained"
    )
    free = list(axes[0])
    if alone:
        _draw_rates(free.pop(0), alone)
        axis = free.pop(0)
        draw_line(axis, _points(alone, lambda step: step.full_bytes, 2**30), "full attention", FULL)
        draw_line(axis, _points(alone, lambda step: step.cca_bytes, 2**30), "CCA", CCA)
        finish(axis, "peak memory, GiB", log_y=False)
    if many:
        axis = free.pop(0)
        efficiencies = {step.gpus: 100 * (step.efficiency or 0) for step in many}
        draw_line(axis, efficiencies, "CCA", CCA)
        tokens = shown_tokens(many[0].cca.params["tokens_per_gpu"])
        title = f"weak scaling, %, {tokens} tokens on each GPU"
        finish(axis, title, "GPUs on one sequence", log_y=False)
    figure.suptitle(f"{_message(measured)}\n{_title(measured)}", fontsize=10, x=0.01, ha="left")
    save(figure, path)


def _draw_rates(axis: Any, alone: Sequence[Step]) -> None:
    """Draw tokens per second, and those at full attention's operations per second."""
    draw_line(
        axis,
        _points(alone, lambda step: step.full.value if step.full else None),
        "full attention",
        FULL,
    )
    allowed = {
        step.length: step.full.value * step.allowed for step in alone if step.full and step.allowed
    }
    draw_line(axis, allowed, "allowed by operations", FLOOR, "--")
    draw_line(axis, _points(alone, lambda step: step.cca.value), "CCA", CCA)
    finish(axis, "tokens per second of a training step", log_y=False)


def _points(
    measured: Sequence[Step], value: Callable[[Step], float | None], unit: float = 1
) -> dict[int, float]:
    """Return the values that were measured, by length."""
    values = {step.length: value(step) for step in measured}
    return {length: number / unit for length, number in values.items() if number is not None}


def _message(measured: Sequence[Step]) -> str:
    """Say how CCA compares at the longest sequence that full attention was measured at."""
    compared = [step for step in measured if step.speedup is not None and not step.fsdp]
    if not compared:
        return "Training steps with CCA"
    last = max(compared, key=lambda step: step.length)
    return f"At {shown_tokens(last.length)} tokens CCA trains {last.speedup:.1f} times as fast"
