"""Commands that measure quality or show what attention does, with heavy imports inside."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from corecontext.cli.options import (
    ChunkSize,
    Data,
    Device,
    Documents,
    Dtype,
    Force,
    GroupSize,
    Json,
    Lengths,
    Limit,
    Model,
    NewTokens,
    NumGroups,
    Patterns,
    Plot,
    Positions,
    Results,
    Seed,
    Shots,
    Sinks,
    Subtasks,
    Tasks,
    WindowSize,
)
from corecontext.files import UserError


def evaluate(
    model: Model,
    task: Tasks,
    data: Data,
    method: Annotated[
        str,
        typer.Option(
            help="cca, full, window, streaming_llm, lm_infinite, minference, mean or max."
        ),
    ] = "cca",
    length: Lengths = None,
    documents: Documents = None,
    subtask: Subtasks = None,
    limit: Limit = None,
    positions: Positions = 5,
    shots: Shots = 5,
    seed: Seed = 42,
    max_new_tokens: NewTokens = None,
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    sinks: Sinks = None,
    patterns: Patterns = None,
    num_groups: NumGroups = None,
    chunk_size: ChunkSize = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    results: Results = None,
    json: Json = None,
) -> None:
    """Evaluate a model from files: perplexity, multi-document QA, RULER, MMLU, LongBench-E."""
    _evaluate(
        model,
        [method],
        task,
        data,
        (length, documents, subtask, limit, positions, shots, seed, max_new_tokens),
        {
            "group_size": group_size,
            "window_size": window_size,
            "sinks": sinks,
            "patterns": patterns,
        },
        {"num_groups": num_groups, "chunk_size": chunk_size, "dtype": dtype, "device": device},
        results,
        json,
    )


def compare(
    model: Model,
    task: Tasks,
    data: Data,
    method: Annotated[list[str], typer.Option(help="As for eval; may be repeated.")] = [
        "full",
        "cca",
    ],
    length: Lengths = None,
    documents: Documents = None,
    subtask: Subtasks = None,
    limit: Limit = None,
    positions: Positions = 5,
    shots: Shots = 5,
    seed: Seed = 42,
    max_new_tokens: NewTokens = None,
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    sinks: Sinks = None,
    patterns: Patterns = None,
    num_groups: NumGroups = None,
    chunk_size: ChunkSize = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    results: Results = None,
    json: Json = None,
    plot: Plot = None,
    force: Force = False,
) -> None:
    """Several methods on several tasks and lengths: one table and one figure."""
    from corecontext.files import check_output

    check_output(plot, force)
    if plot is not None:
        from corecontext.drawing import check_plot

        check_plot(plot)
    rows = _evaluate(
        model,
        method,
        task,
        data,
        (length, documents, subtask, limit, positions, shots, seed, max_new_tokens),
        {
            "group_size": group_size,
            "window_size": window_size,
            "sinks": sinks,
            "patterns": patterns,
        },
        {"num_groups": num_groups, "chunk_size": chunk_size, "dtype": dtype, "device": device},
        results,
        json,
    )
    if plot is not None:
        from corecontext.eval.summary import draw

        draw(rows, plot)


def _evaluate(
    model: str,
    methods: list[str],
    tasks: list[str],
    data: list[str],
    settings: tuple[Any, ...],
    sizes: dict[str, Any],
    options: dict[str, Any],
    results: str | None,
    json: str | None,
) -> list[Any]:
    """What `eval` and `compare` share; returns the table's rows."""
    from corecontext.files import check_output

    chunk_size = options["chunk_size"]
    if chunk_size is not None and chunk_size < 1:
        raise UserError(f"chunk-size must be at least 1, got {chunk_size}.")
    if chunk_size is not None and options["num_groups"] is not None:
        from corecontext.loading import WHOLE

        raise UserError(WHOLE)
    for path in (results, json):
        check_output(path, force=True)  # appended to
    from corecontext.eval.evaluate import ModelOptions
    from corecontext.eval.evaluate import evaluate as run
    from corecontext.eval.items import Settings
    from corecontext.eval.summary import print_table, summarise, to_records

    length, documents, subtask, *others = settings
    chosen = Settings(tuple(length or ()), tuple(documents or (20,)), tuple(subtask or ()), *others)
    records = run(model, methods, tasks, data, chosen, ModelOptions(sizes, **options), results)
    rows = summarise(records)
    if json is not None:
        from corecontext.record import append_records

        append_records(json, to_records(rows, records[0].device))
    print_table(rows, parts=len(methods) == 1 or len(rows) <= 60)
    return rows


def inspect(
    file: Annotated[str, typer.Argument(help="Text, or - for standard input.")],
    model: Model,
    output: Annotated[str, typer.Option(help="The page, an .html file.")],
    max_tokens: Annotated[
        int, typer.Option(help="Look at no more than the text's first tokens.")
    ] = 512,
    queries: Annotated[
        int,
        typer.Option(
            help="Queries to choose from, evenly spaced; the last one is the text's last token."
        ),
    ] = 16,
    position: Annotated[
        list[int] | None, typer.Option(help="Position of a query, instead; may be repeated.")
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(help="Layer, from 0; may be repeated. Default: all.")
    ] = None,
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    sinks: Sinks = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    force: Force = False,
) -> None:
    """A page that shows which tokens core tokens listen to and which core tokens a query looks
    at."""
    from corecontext.files import check_output, read_text, write_text

    if queries < 1 or max_tokens < 1:
        raise UserError(
            f"queries and max-tokens must be at least 1, got {queries} and {max_tokens}."
        )
    check_output(output, force)
    text = read_text(file)
    from corecontext.eval.inspect.page import inspect_text
    from corecontext.loading import load

    loaded = load(
        model,
        group_size=group_size,
        window_size=window_size,
        sinks=sinks,
        dtype=dtype,
        device=device,
    )
    write_text(
        output, inspect_text(loaded, model, text, max_tokens, queries, position or (), layer or ())
    )
    print(f"wrote {output}")


def layers(
    file: Annotated[str, typer.Argument(help="Text like that to come, or - for standard input.")],
    model: Model,
    length: Annotated[
        int, typer.Option(help="Tokens of a row; the model's trained length or less.")
    ] = 8192,
    rows: Annotated[int, typer.Option(help="Most rows of the text.")] = 4,
    heads: Annotated[
        bool,
        typer.Option(
            "--heads", help="Choose KV heads, of the quarter of the layers that are best."
        ),
    ] = False,
    count: Annotated[
        int | None,
        typer.Option(
            help="Layers, or heads, to choose. Default: an eighth of the "
            "layers, a sixteenth of all heads; with --raw at most "
            "what takes half of the cache."
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="What is chosen keeps every token; the window shrinks for it."),
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(help="New folder: a copy of the checkpoint that loads with these sizes."),
    ] = None,
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Find the layers or KV heads that need small groups, or every token, and all sizes at the same
    cache size."""
    from corecontext.files import check_output, read_text

    if rows < 1 or length < 2:
        raise UserError(f"rows must be at least 1 and length at least 2, got {rows} and {length}.")
    check_output(json, force=True)  # appended to
    if output is not None and os.path.exists(output):
        raise UserError(f"output '{output}' already exists. Give a new folder.")
    text = read_text(file)
    from corecontext.heads.report import find_layers, layer_records, print_layers
    from corecontext.loading import load
    from corecontext.record import append_records, device_name

    loaded = load(model, group_size=group_size, window_size=window_size, dtype=dtype, device=device)
    if raw and window_size is None and loaded.config is not None and loaded.config.varies:
        raise UserError(
            f"window-size must be given with --raw for a checkpoint that has sizes by layer or head, whose "
            f"window of {loaded.config.window_size} may have paid for heads already; got none. Use "
            "--window-size."
        )
    found = find_layers(loaded, text, length, rows, count, heads, raw)
    if json is not None:
        params = {
            "model": os.path.basename(os.path.normpath(model)),
            **loaded.sizes(),
            "length": length,
        }
        append_records(
            json, layer_records(found.search.trials, params, device_name(str(loaded.model.device)))
        )
    print_layers(found)
    if output is not None:
        from corecontext.train.run import convert as copy

        copy(model, output, found.config)
        print(f"wrote {output}")
