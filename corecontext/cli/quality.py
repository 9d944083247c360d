"""Commands that measure quality or show the attention. Heavy imports are inside, so that help is
fast."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from corecontext.cli.options import (
    SIZES,
    AnyMethod,
    Data,
    EvaluationOptions,
    Force,
    LoadOptions,
    Model,
    Tasks,
    Text,
    check_appended,
    check_least,
    publish,
    with_options,
    with_settings,
)
from corecontext.files import UserError

with_attention = with_settings(*SIZES, "fetch_groups", "fetch_index", "prefill")
"""Lets a command take the settings of an evaluation."""


@with_options(EvaluationOptions)
@with_attention
def evaluate(
    model: Model,
    task: Tasks,
    options: EvaluationOptions,
    settings: dict[str, Any],
    data: Data = None,
    method: AnyMethod = "cca",
) -> None:
    """Evaluate a model from files: perplexity, or questions about one of many passages."""
    from corecontext.eval.task_table import TASKS

    run_evaluation(model, [method], task, data or (), options, settings, TASKS)


@with_options(EvaluationOptions)
@with_attention
def compare(
    model: Model,
    task: Tasks,
    options: EvaluationOptions,
    settings: dict[str, Any],
    data: Data = None,
    method: Annotated[list[str], typer.Option(help="As for eval; may be repeated.")] = [
        "full",
        "cca",
    ],
) -> None:
    """Compare several methods on several tasks and lengths in one table."""
    from corecontext.eval.task_table import TASKS

    run_evaluation(model, method, task, data or (), options, settings, TASKS)


def run_evaluation(
    model: str,
    methods: Sequence[Any],
    names: Sequence[str],
    data: Sequence[str],
    options: EvaluationOptions,
    settings: dict[str, Any],
    tasks: Mapping[str, Any],
) -> None:
    """Run methods on tasks, print their table, and write the records that the options ask for.

    Args:
        methods: By name; each loads the model once.
        names: Of the tasks, keys of `tasks`.
        data: Folders with the tasks' files, or TASK=PATH each.
        settings: Those of CCA and of rivals, by name; each method takes those that it has.
        tasks: The tasks that there are, by name.
    """
    check_least(1, chunk_size=options.chunk_size)
    if options.chunk_size is not None and options.num_groups is not None:
        from corecontext.loading import WHOLE

        raise UserError(WHOLE)  # a constant number of groups needs the whole text at once
    check_appended(options.results, options.json)
    from corecontext.eval.evaluate import ModelOptions
    from corecontext.eval.evaluate import evaluate as run
    from corecontext.eval.items import Settings
    from corecontext.eval.summary import print_table, summarise, to_records
    from corecontext.eval.task_table import pick_tasks

    questions = Settings(
        lengths=tuple(options.length or ()),
        documents=tuple(options.documents or Settings().documents),
        subtasks=tuple(options.subtask or ()),
        limit=options.limit,
        positions=options.positions,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
    )
    model_options = ModelOptions(
        settings={**settings, "untested": options.untested},
        num_groups=options.num_groups,
        chunk_size=options.chunk_size,
        chat_template=options.chat_template,
        dtype=options.dtype,
        device=options.device,
    )
    chosen = pick_tasks(names, tasks)
    records = run(model, methods, chosen, data, questions, model_options, options.results)
    rows = summarise(records, tasks)
    publish(
        options.json,
        # Parts of many rows would hide the comparison of the whole.
        lambda: print_table(rows, parts=len(methods) == 1 or len(rows) <= 60),
        lambda: to_records(rows, records[0].device),
    )


@with_options(LoadOptions)
@with_settings(*SIZES)
def inspect(
    file: Text,
    model: Model,
    options: LoadOptions,
    settings: dict[str, Any],
    output: Annotated[str, typer.Option(help="Page to write, an .html file.")],
    max_tokens: Annotated[
        int, typer.Option(help="Inspect this many tokens from the start of the text.")
    ] = 512,
    queries: Annotated[
        int, typer.Option(help="Queries to choose from, evenly spaced up to the last token.")
    ] = 16,
    position: Annotated[
        list[int] | None,
        typer.Option(help="Position of a query, instead of --queries; may be repeated."),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(help="Layer, from 0; may be repeated. Default: all.")
    ] = None,
    force: Force = False,
) -> None:
    """Write a page of the attention: the weights of tokens in core tokens, and of core tokens in a
    query."""
    from corecontext.files import check_output, one_line, read_text, write_text

    check_least(1, queries=queries, max_tokens=max_tokens)
    check_output(output, force)
    text = read_text(file)
    from corecontext.eval.inspect.page import inspect_text
    from corecontext.loading import load

    loaded = load(model, **settings, **vars(options))
    with one_line():
        page = inspect_text(loaded, model, text, max_tokens, queries, position or (), layer or ())
    write_text(output, page)
    print(f"wrote {output}")
