"""The command line of the suites: `python -m reproduction compare`."""

from typing import Annotated, Any

import typer

from corecontext.cli.options import Data, EvaluationOptions, Model, with_options
from corecontext.cli.quality import run_evaluation, with_attention


@with_options(EvaluationOptions)
@with_attention
def compare(
    model: Model,
    task: Annotated[
        list[str],
        typer.Option(help="perplexity, multidoc_qa, ruler, mmlu or longbench; may be repeated."),
    ],
    options: EvaluationOptions,
    settings: dict[str, Any],
    data: Data = None,
    method: Annotated[
        list[str],
        typer.Option(
            help="As for `corecontext compare`, or minference, duo_attention, mean or max; may be "
            "repeated."
        ),
    ] = ["full", "cca"],
    patterns: Annotated[
        str | None, typer.Option(help="File with the model's patterns: minference.")
    ] = None,
    full_heads: Annotated[
        str | None,
        typer.Option(
            help="KV heads that duo_attention shows all tokens, as LAYER:HEAD,... Default: those "
            "that keep every token in the checkpoint's settings."
        ),
    ] = None,
) -> None:
    """Compare methods as `corecontext compare` does, with more tasks and more rivals.

    --length is that of prompt and answer (ruler), or of a prompt before its middle is cut
    (longbench). Only ruler:vt and ruler:fwe need no data.
    """
    from reproduction.attentions.choice import pick_attention
    from reproduction.suites.tasks import SUITES

    methods = [pick_attention(name, model, patterns, full_heads) for name in method]
    run_evaluation(model, methods, task, data or (), options, settings, SUITES)
