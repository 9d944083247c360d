"""Run the benchmarks from the command line; the options are the fields of their settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.model_settings import ModelBench, model_defaults
from benchmarks.operator_settings import OperatorBench
from benchmarks.options import Output, for_device, make_command
from benchmarks.serving_settings import ServeBench
from benchmarks.training_settings import TrainingBench
from benchmarks.user import UserBench
from benchmarks.vllm import VllmBench
from corecontext.cli.entry import application, run
from corecontext.files import UserError
from corecontext.loading import one_line, pick_device
from corecontext.record import Record
from corecontext.terminal import console


def _show(text: str) -> None:
    """Print the tables of a page."""
    from benchmarks.tables import print_page

    print_page(text.splitlines())


def bench_operator(given: dict[str, Any], output: Output) -> None:
    """CCA against full causal attention on this machine: time, peak memory, decoding, and the
    floor."""
    from benchmarks.operator import run_operator_bench
    from benchmarks.operator_figure import draw_operator
    from benchmarks.operator_tables import operator_markdown

    device = pick_device(given.pop("device", "auto"))
    if "forward_only" in given or "passes" in given:
        given.setdefault("decode_batches", ())
    with one_line():
        bench = for_device(OperatorBench, device, **given)
    records = run_operator_bench(bench, output.keep)
    output.draw(draw_operator, records)
    _show(operator_markdown(records))


def bench_model(given: dict[str, Any], output: Output) -> None:
    """Whole models, CCA against full attention and StreamingLLM: first token, next token, memory,
    throughput."""
    from benchmarks.model import run_model_bench
    from benchmarks.model_figure import draw_model, draw_sweep
    from benchmarks.model_tables import model_markdown

    device = pick_device(given.pop("device", "auto"))
    with one_line():
        bench = model_defaults(device, **given)
    records = run_model_bench(bench, output.keep)
    output.draw(draw_sweep if bench.sweep else draw_model, records)
    _show(model_markdown(records, every_size=True))


def bench_train(given: dict[str, Any], output: Output) -> None:
    """Tokens per second and peak memory of a full fine-tuning step, with CCA and with full
    attention."""
    from benchmarks.training import run_training_bench
    from benchmarks.training_report import draw_training, training_markdown
    from corecontext.record import read_records

    device = pick_device(given.pop("device", "auto"))
    with one_line():
        bench = for_device(TrainingBench, device, **given)
    records = run_training_bench(bench, output.keep)
    if not records:  # another process has them
        return
    if output.json is not None:  # earlier measurements belong to the same picture
        records = read_records(output.json)
    output.draw(draw_training, records)
    if any(r.name == "training.tokens_per_s" for r in records):
        _show(training_markdown(records))


def bench_serve(given: dict[str, Any], output: Output) -> None:
    """Latency, throughput and chosen g and s of a server under load; needs the extra 'serve' and
    httpx."""
    from benchmarks.serving import run_serve_bench
    from benchmarks.serving_report import draw_serve, serving_markdown

    with one_line():
        bench = ServeBench(**given)
    if output.plot is not None and bench.mode == "saturated":
        raise UserError(
            "plot must be left out for a saturated server: it gives one number for each variant."
        )
    records = run_serve_bench(bench, output.keep)
    output.draw(draw_serve, records)
    _show(serving_markdown(records))


def bench_vllm(given: dict[str, Any], output: Output) -> None:
    """vLLM with core context beside vLLM with its own attention on this GPU; needs the extra
    'vllm'."""
    from benchmarks.vllm import run_vllm_bench
    from benchmarks.vllm_report import vllm_markdown
    from benchmarks.vllm_turns import measure_in_turns

    with one_line():
        bench = VllmBench(**given)
    if output.plot is not None:
        raise UserError("plot must be left out: this benchmark has no figure.")
    records: list[Record] = []

    def keep(new: list[Record]) -> None:
        records.extend(new)
        output.keep(new)

    try:
        run = measure_in_turns if bench.turns else run_vllm_bench
        run(bench, keep)
    finally:
        if records:  # of the methods that were measured
            _show(vllm_markdown(records))


def bench_published(
    only: Annotated[str, typer.Option(help="Part of a command: run no others.")] = "",
    limit_minutes: Annotated[
        float | None, typer.Option(help="Stop after so many minutes; the next run goes on.")
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Print the pending commands, run none.")
    ] = False,
    results: Annotated[str, typer.Option(help="Folder of the records.")] = "results",
) -> None:
    """Run the commands of the published records that have none at this commit."""
    from benchmarks.published import measure, pending, recorded_command

    if limit_minutes is not None and not limit_minutes > 0:
        raise UserError(f"limit-minutes must be above 0, got {limit_minutes}.")
    with one_line():
        rows = pending(Path(results), only)
    if list_only:
        for row in rows:
            console().print(recorded_command(row), soft_wrap=True)
        return
    reasons = measure(rows, Path(results), None if limit_minutes is None else 60 * limit_minutes)
    if reasons:
        raise UserError("published must measure each command. " + "; ".join(reasons))


def bench_user(given: dict[str, Any], output: Output) -> None:
    """Measure what a user waits for under full attention and presets: tokens, and bytes."""
    from benchmarks.user import run_user_bench, user_markdown

    device = pick_device(given.pop("device", "auto"))
    if output.plot is not None:
        raise UserError("plot must be left out: this benchmark has no figure.")
    with one_line():
        bench = for_device(UserBench, device, **given)
    _show(user_markdown(run_user_bench(bench, output.keep)))


COMMANDS = {
    "operator": make_command(OperatorBench, bench_operator),
    "model": make_command(ModelBench, bench_model),
    "train": make_command(TrainingBench, bench_train),
    "user": make_command(UserBench, bench_user),
    "serve": make_command(ServeBench, bench_serve),
    "vllm": make_command(VllmBench, bench_vllm),
    "published": bench_published,
}


def _top() -> None:
    """Measure speed and memory on this machine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns its exit code."""
    return run(application(COMMANDS, _top), "python -m benchmarks", argv)
