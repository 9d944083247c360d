"""The command line of the reproduction."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from corecontext.cli.entry import run
from corecontext.cli.options import Device, Dtype, Json
from corecontext.files import UserError


def reproduce(
    out: Annotated[
        str,
        typer.Option(
            help="Work folder: weights, records, figures, report.html. The "
            "same command goes on where it was interrupted."
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder with lm_train, lm_val, lm_test, tokenizer.json "
            "and the tasks' files (docs/reproduction.md)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Evaluate this checkpoint instead of small models trained here."),
    ] = None,
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="Everything with tiny models, in seconds; the numbers mean nothing."
        ),
    ] = False,
    brief: Annotated[
        bool,
        typer.Option(
            "--brief",
            help="One small base, and CCA with masses and with fetch, untrained and adapted: "
            "minutes on one GPU.",
        ),
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            help="With --brief: a Llama's folder instead of the base trained here. The data's "
            "tokenizer must be its own."
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Stop after this time; what is under way is saved.")
    ] = None,
    stage: Annotated[
        list[str] | None,
        typer.Option(help="Run this stage and what it needs; may be repeated. Default: all."),
    ] = None,
    finalist: Annotated[
        list[str] | None, typer.Option(help="A method to run with every seed; may be repeated.")
    ] = None,
    gpus: Annotated[
        int, typer.Option(help="Run as many stages at once, each on a GPU of its own.")
    ] = 1,
    limit: Annotated[
        int | None, typer.Option(help="Most questions of each subtask. Default: all.")
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a window or prompt; may be repeated. Default: the task's."),
    ] = None,
    documents: Annotated[
        list[int] | None, typer.Option(help="Passages (multidoc_qa); may be repeated. Default: 20.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = None,
) -> None:
    """The paper's tables and figures: with small models trained here, or on a checkpoint.

    `python -m reproduction real` measures attentions on a pretrained model, `python -m
    reproduction rivals` beside kvpress, `python -m reproduction compare` on RULER, MMLU and
    LongBench-E, `python -m reproduction served` behind `vllm serve`, `python -m reproduction
    choices` rules by which fetch chooses.
    """
    from pathlib import Path

    from corecontext.files import check_output

    check_output(json, force=True)  # appended to
    if minutes is not None and not minutes > 0:
        raise UserError(f"minutes must be above 0, got {minutes}.")
    if gpus < 1 or (gpus > 1 and model is not None):
        raise UserError(f"gpus must be at least 1, and 1 with a model, got {gpus}.")
    if smoke and brief:
        raise UserError("smoke must not be given with brief: each is a size. Give one of them.")
    if base is not None and not brief:
        raise UserError("base must be given with brief, got it alone. Use --brief.")
    if model is not None and (smoke or brief or minutes is not None or stage or finalist):
        raise UserError(
            "smoke, brief, minutes, stage and finalist must be given without a model, which is not "
            "trained."
        )
    if model is None and (limit is not None or length or documents or dtype != "auto"):
        raise UserError(
            "limit, length, documents and dtype must be given with a model: the miniature has its "
            "own."
        )
    from benchmarks.drawing import check_plot
    from corecontext.loading import pick_device

    check_plot("report.png")
    device = pick_device(device)
    if model is not None:
        if data is None:
            raise UserError("data must be given with a model, got none. Use --data FOLDER.")
        from corecontext.eval.evaluate import ModelOptions
        from corecontext.eval.items import Settings
        from reproduction.on_checkpoint import reproduce_checkpoint

        settings = Settings(tuple(length or ()), tuple(documents or (20,)), limit=limit)
        report = reproduce_checkpoint(
            model,
            data,
            Path(out),
            settings=settings,
            options=ModelOptions(dtype=dtype, device=device),
            json_path=json,
        )
        print(f"wrote {report}")
        return
    from reproduction.sizes import BRIEF, FULL, SMOKE, brief_of

    size = FULL
    if smoke:
        size = SMOKE
    elif base is not None:
        size = brief_of(base)
    elif brief:
        size = BRIEF
    if data is None and not smoke:
        raise UserError(
            "data must be given, got none. Use --data FOLDER, or --smoke to try the machinery."
        )
    if data is not None and not os.path.exists(out):
        from corecontext.data.readers import find_file

        # Before a new work folder becomes this data's.
        for name in ("lm_train", "lm_val", "lm_test"):
            find_file(data, (name,))
    from reproduction.processes import run_on_gpus
    from reproduction.report import write_report
    from reproduction.run import Miniature

    arguments: dict[str, Any] = {
        "folder": out,
        "size": size,
        "data": data,
        "device": device,
        "finalists": tuple(finalist or ()),
        "minutes": minutes or float("inf"),
        "json_path": json,
    }
    run = Miniature(**arguments)
    only = tuple(stage or ())
    done = run_on_gpus(gpus, arguments, only) if gpus > 1 else run.run(only)
    report = write_report(Path(out), run.records(), run.size)
    print(f"wrote {report}" + "; not all stages are done: run the same command again" * (not done))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the reproduction, or a measurement on a pretrained model: `real`, its `indices` and
    `choices`, `rivals` beside kvpress, `compare` on suites, `layers`, or `served` by vLLM; returns
    the exit code."""
    from reproduction.indices.command import indices
    from reproduction.layers_command import layers
    from reproduction.real.choices_command import choices
    from reproduction.real.command import real
    from reproduction.real.served_command import served
    from reproduction.rivals.command import rivals
    from reproduction.suites.command import compare

    measurements = {"real": real, "rivals": rivals, "indices": indices, "compare": compare}
    measurements |= {"layers": layers, "served": served, "choices": choices}
    arguments = list(sys.argv[1:] if argv is None else argv)
    command: Any = reproduce
    program = "python -m reproduction"
    if arguments and arguments[0] in measurements:
        command = measurements[arguments[0]]
        program += f" {arguments.pop(0)}"
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return run(app, program, arguments)
