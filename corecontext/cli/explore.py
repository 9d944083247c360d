"""Commands that read a text or describe a model, with heavy imports inside."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from corecontext.cli.options import (
    ChunkSize,
    Device,
    Dtype,
    Force,
    GroupSize,
    Json,
    LoadOptions,
    Model,
    Plot,
    Sinks,
    Text,
    WindowSize,
    check_appended,
    check_drawn,
    check_least,
    publish,
    with_options,
)
from corecontext.config import DEFAULT_GROUP_SIZE
from corecontext.files import UserError


def demo(
    max_tokens: Annotated[
        int | None, typer.Option(help="Cut the document to this many tokens. Default: all of it.")
    ] = None,
    group_size: Annotated[int, typer.Option(help="Tokens per core token, g.")] = DEFAULT_GROUP_SIZE,
    window_size: Annotated[int, typer.Option(help="Nearest tokens kept as they are, s.")] = 512,
    questions: Annotated[int, typer.Option(help="Facts to plant and ask for.")] = 6,
    dtype: Dtype = "auto",
    device: Device = "auto",
    plot: Plot = None,
    json: Json = None,
    force: Force = False,
) -> None:
    """Compare full attention and CCA on a bundled model and document: time, memory, perplexity,
    retrieval."""
    check_drawn(plot, force)
    check_appended(json)
    from corecontext.demo.compare import DemoSettings, run_demo
    from corecontext.demo.report import print_report

    result = run_demo(
        DemoSettings(group_size, window_size, questions, max_tokens, dtype=dtype, device=device)
    )
    publish(json, lambda: print_report(result), lambda: result.records)
    if plot is not None:
        from corecontext.demo.report import draw_demo

        draw_demo(result.records, plot)


@with_options(LoadOptions)
def generate(
    model: Model,
    prompt_file: Annotated[str, typer.Option(help="Text to continue, or - for standard input.")],
    options: LoadOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; larger values sample.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chunk_size: ChunkSize = None,
    output: Annotated[
        str | None, typer.Option(help="Write to this file instead of standard output.")
    ] = None,
    force: Force = False,
) -> None:
    """Continue a text, printing it as it is generated."""
    from corecontext.files import check_output, read_text, write_text

    check_least(1, max_new_tokens=max_new_tokens, chunk_size=chunk_size)
    if not temperature >= 0:
        raise UserError(f"temperature must be at least 0, got {temperature}.")
    if temperature > 1e30:
        raise UserError(f"temperature must be at least 0 and at most 1e30, got {temperature}.")
    if not -(2**63) <= seed < 2**63:
        raise UserError(f"seed must be from -2**63 to 2**63 - 1, got {seed}.")
    check_output(output, force)
    prompt = read_text(prompt_file)
    from corecontext.generation import generate as run
    from corecontext.loading import encode, load
    from corecontext.terminal import progress

    loaded = load(model, **vars(options))
    input_ids = encode(loaded, prompt, room_for=max_new_tokens)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "chunk_size": chunk_size,
    }
    if output is None:
        run(loaded, input_ids, on_text=lambda text: print(text, end="", flush=True), **settings)
        print()
        return
    pieces: list[str] = []
    title = f"prompt of {input_ids.shape[1]} tokens, then {max_new_tokens} new ones"
    with progress(title, max_new_tokens) as advance:

        def keep(text: str) -> None:
            pieces.append(text)
            advance(1)

        run(loaded, input_ids, on_text=keep, **settings)
    write_text(output, "".join(pieces))


@with_options(LoadOptions)
def perplexity(
    file: Text,
    model: Model,
    options: LoadOptions,
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure full attention and CCA.")
    ] = False,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens per forward pass; bounds the memory. Default: 1024; under num_groups the "
            "whole text."
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Measure the perplexity of a whole text in one causal pass, by position."""
    check_least(1, chunk_size=chunk_size)
    check_appended(json)
    from corecontext.files import read_text

    text = read_text(file)
    from corecontext.loading import load
    from corecontext.perplexity import measure, print_table, to_records

    runs = {options.method: options}
    if compare:
        full = dataclasses.replace(options, method="full", sinks=None, cache_dtype=None)
        runs = {"full": full, "cca": dataclasses.replace(options, method="cca")}
    results = {
        method: measure(load(model, **vars(settings)), text, method, chunk_size)
        for method, settings in runs.items()
    }
    publish(json, lambda: print_table(results), lambda: to_records(results, model))


def info(
    model: Model,
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    sinks: Sinks = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Prompt length; may be repeated. Default: powers of two to the limit."),
    ] = None,
) -> None:
    """Estimate the costs and savings of CCA for a model, by length; loads no weights."""
    for value in length or ():
        check_least(1, length=value)
    from corecontext.info import print_info

    print_info(model, group_size, window_size, length, sinks)
