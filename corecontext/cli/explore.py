"""Commands that read a text or look at a model, with heavy imports inside."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from corecontext.cli.options import (
    CacheDtype,
    Device,
    Dtype,
    Force,
    GroupSize,
    Json,
    Method,
    Model,
    Plot,
    Sinks,
    WindowSize,
)
from corecontext.files import UserError


def demo(
    max_tokens: Annotated[
        int | None, typer.Option(help="Cut the document to this many tokens.")
    ] = None,
    group_size: Annotated[int, typer.Option(help="Tokens per core token, g.")] = 16,
    window_size: Annotated[int, typer.Option(help="Nearest tokens kept as they are, s.")] = 512,
    questions: Annotated[int, typer.Option(help="Facts to plant and ask for.")] = 6,
    dtype: Dtype = "auto",
    device: Device = "auto",
    plot: Plot = None,
    json: Json = None,
    force: Force = False,
) -> None:
    """Full attention and CCA side by side on a bundled model and document: time, memory,
    perplexity, retrieval."""
    from corecontext.files import check_output

    check_output(plot, force)
    check_output(json, force=True)  # appended to
    if plot is not None:
        from corecontext.drawing import check_plot

        check_plot(plot)
    from corecontext.demo.compare import DemoSettings, run_demo
    from corecontext.demo.table import print_report
    from corecontext.record import append_records

    result = run_demo(
        DemoSettings(group_size, window_size, questions, max_tokens, dtype=dtype, device=device)
    )
    if json is not None:
        append_records(json, result.records)
    if plot is not None:
        from corecontext.demo.figure import draw_demo

        draw_demo(result.records, plot)
    print_report(result)


def generate(
    model: Model,
    prompt_file: Annotated[str, typer.Option(help="Text to continue, or - for standard input.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; more samples.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    method: Method = "cca",
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the prompt read at once; bounds the "
            "memory. Default: by the free memory."
        ),
    ] = None,
    sinks: Sinks = None,
    cache_dtype: CacheDtype = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    output: Annotated[
        str | None, typer.Option(help="Write here instead of standard output.")
    ] = None,
    force: Force = False,
) -> None:
    """Continue a text, printing it as it is made."""
    from corecontext.files import check_output, read_text, write_text

    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens must be at least 1, got {max_new_tokens}.")
    if not 0 <= temperature <= 1e30:
        raise UserError(
            f"temperature must be at least 0{' and at most 1e30' if temperature > 0 else ''}, got "
            f"{temperature}."
        )
    if not -(2**63) <= seed < 2**63:
        raise UserError(f"seed must be from -2**63 to 2**63 - 1, got {seed}.")
    if chunk_size is not None and chunk_size < 1:
        raise UserError(f"chunk-size must be at least 1, got {chunk_size}.")
    check_output(output, force)
    prompt = read_text(prompt_file)
    from corecontext.generation import generate as run
    from corecontext.loading import encode, load
    from corecontext.terminal import progress

    loaded = load(
        model,
        method=method,
        group_size=group_size,
        window_size=window_size,
        sinks=sinks,
        cache_dtype=cache_dtype,
        dtype=dtype,
        device=device,
    )
    input_ids = encode(loaded, prompt, room_for=max_new_tokens)
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "chunk_size": chunk_size,
    }
    if output is None:
        run(loaded, input_ids, on_text=lambda text: print(text, end="", flush=True), **options)
        print()
        return
    pieces: list[str] = []
    with progress(
        f"prompt of {input_ids.shape[1]} tokens, then {max_new_tokens} new ones", max_new_tokens
    ) as advance:

        def keep(text: str) -> None:
            pieces.append(text)
            advance(1)

        run(loaded, input_ids, on_text=keep, **options)
    write_text(output, "".join(pieces))


def perplexity(
    file: Annotated[str, typer.Argument(help="Text, or - for standard input.")],
    model: Model,
    method: Method = "cca",
    compare: Annotated[
        bool, typer.Option("--compare", help="Measure full attention and CCA.")
    ] = False,
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens per forward pass; bounds the memory. Default: 1024; all of the text under num_groups."
        ),
    ] = None,
    sinks: Sinks = None,
    cache_dtype: CacheDtype = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Perplexity of a whole text in one causal pass, by position."""
    from corecontext.files import check_output, read_text

    if chunk_size is not None and chunk_size < 1:
        raise UserError(f"chunk-size must be at least 1, got {chunk_size}.")
    check_output(json, force=True)  # appended to
    text = read_text(file)
    from corecontext.loading import METHODS, WHOLE, encode, load
    from corecontext.perplexity import Perplexity, document_nll, print_table, to_records
    from corecontext.terminal import progress

    found = {}
    for one in METHODS[::-1] if compare else (method,):
        own: dict[str, Any] = (
            {} if compare and one == "full" else {"sinks": sinks, "cache_dtype": cache_dtype}
        )
        loaded = load(
            model,
            method=one,
            group_size=group_size,
            window_size=window_size,
            dtype=dtype,
            device=device,
            **own,
        )
        input_ids = encode(loaded, text, at_least=2)
        whole = loaded.config is not None and loaded.config.num_groups is not None
        if whole and chunk_size is not None:
            raise UserError(WHOLE)
        chunk = chunk_size or (input_ids.shape[1] if whole else 1024)
        with progress(f"{one}, {input_ids.shape[1]} tokens", input_ids.shape[1]) as advance:
            nll = document_nll(loaded.model, input_ids, chunk_size=chunk, on_chunk=advance)
        found[one] = Perplexity(nll, len(text.encode()), loaded.sizes())
    if json is not None:
        from corecontext.record import append_records

        append_records(json, to_records(found, model))
    print_table(found)


def info(
    model: Model,
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    sinks: Sinks = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Prompt length; may be repeated.")
    ] = None,
) -> None:
    """What CCA would cost and save for a model, by length; loads no weights."""
    for value in length or ():
        if value < 1:
            raise UserError(f"length must be at least 1, got {value}.")
    from corecontext.info import print_info

    print_info(model, group_size, window_size, length, sinks)
