"""Commands that read a text or describe a model. Heavy imports are inside, so that help is fast."""

import contextlib
import sys
from typing import Annotated, Any

import typer

from corecontext.cli.options import (
    MODEL_HELP,
    SIZES,
    AnyMethod,
    ChunkSize,
    Device,
    Dtype,
    Force,
    Json,
    LoadOptions,
    Model,
    Text,
    Untested,
    check_appended,
    check_least,
    publish,
    unpacked,
    with_options,
    with_settings,
)
from corecontext.config import CCAConfig
from corecontext.files import UserError
from corecontext.methods import CCA_SETTINGS


@with_settings(*CCA_SETTINGS)
def demo(
    settings: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Option(help=f"{MODEL_HELP} Default: the bundled model.", callback=unpacked),
    ] = None,
    document: Annotated[
        str | None, typer.Option(help="Text of yours, or - for standard input. Default: a book's.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Cut the document to this many tokens. Default: all of it; on a CPU 22528, with "
            "--model 2560, or half and down to 1024 where one prompt takes longer than two minutes."
        ),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(
            help="Facts to plant and ask for (default 6), or with --model prompts, each with a "
            "number to find (default 3; on a CPU as many as two minutes allow, at least 1)."
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Compare full attention, a window of the same bytes and CCA by the checkpoint's settings or
    the default, on a bundled model and document, or on yours: time, memory, perplexity, retrieval.
    """
    check_appended(json)
    from corecontext.demo.compare import DemoSettings, run_demo
    from corecontext.demo.report import print_report

    result = run_demo(DemoSettings(model, document, questions, max_tokens, settings, dtype, device))
    publish(json, lambda: print_report(result), lambda: result.records)


@with_options(LoadOptions)
@with_settings(*CCA_SETTINGS)
def generate(
    model: Model,
    options: LoadOptions,
    settings: dict[str, Any],
    method: AnyMethod = "cca",
    prompt_file: Annotated[
        str | None, typer.Option(help="Text to continue, or - for standard input.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue, in place of --prompt-file.")
    ] = None,
    question: Annotated[str | None, typer.Option(help="Ask this about the text.")] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Give the text as a user's message in the model's chat template. Default: where "
            "there is a --question and a template.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token; larger values sample.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(help="Sample among this many likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample among the likeliest tokens that have this probability together."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    chunk_size: ChunkSize = None,
    output: Annotated[
        str | None, typer.Option(help="Write to this file instead of standard output.")
    ] = None,
    force: Force = False,
) -> None:
    """Continue a text or answer a question about it, printing the text as it is generated."""
    from corecontext.files import check_output, read_text, write_text
    from corecontext.generation import Continuation, encode_prompt
    from corecontext.generation import generate as run

    check_least(1, max_new_tokens=max_new_tokens, chunk_size=chunk_size)
    if (prompt is None) == (prompt_file is None):
        raise UserError("prompt must be given by --prompt-file or by --prompt, one of them.")
    continuation = Continuation(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        chunk_size=chunk_size,
    )
    check_output(output, force)
    if prompt_file is not None:
        prompt = read_text(prompt_file)
    assert prompt is not None, "one of the two was given"
    from corecontext.loading import load
    from corecontext.terminal import progress

    loaded = load(model, method=method, **settings, **vars(options))
    input_ids = encode_prompt(loaded, prompt, question, chat_template, room_for=max_new_tokens)
    length = input_ids.shape[1]
    total = length if output is None else length + max_new_tokens
    more = "" if output is None else f", then {max_new_tokens} new ones"
    pieces: list[str] = []
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(progress(f"prompt of {length} tokens{more}", total))
        read = 0

        def on_chunk(tokens: int) -> None:  # so many of the prompt are read
            nonlocal read
            advance(tokens - read)
            read = tokens

        def on_text(text: str) -> None:
            if output is None:
                stack.close()  # the bar, which would share the terminal with the text
                print(text, end="", flush=True)
                return
            pieces.append(text)
            advance(1)

        made = run(loaded, input_ids, continuation, on_text=on_text, on_chunk=on_chunk)
    if output is None:
        print()
    else:
        write_text(output, "".join(pieces))
    note = loaded.idle_note(length + made)
    if note:
        print(note, file=sys.stderr)


@with_options(LoadOptions)
@with_settings(*CCA_SETTINGS)
def perplexity(
    file: Text,
    model: Model,
    options: LoadOptions,
    settings: dict[str, Any],
    method: AnyMethod = "cca",
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Measure full attention, CCA (with raw first tokens too, if its settings keep "
            "none), a window as large, and StreamingLLM, side by side.",
        ),
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
    methods = [method]
    if compare:
        methods = ["full", "cca", "window", "streaming_llm"]
        if method != "cca":
            raise UserError(
                "method must be left out with --compare, which measures full, cca, window and "
                f"streaming_llm, got {method!r}."
            )
    check_appended(json)
    from corecontext.files import read_text

    text = read_text(file)
    from corecontext.loading import load
    from corecontext.methods import settings_taken
    from corecontext.perplexity import Perplexity, measure, print_table, to_records

    results: dict[str, Perplexity] = {}

    def run(name: str, method: str, **changes: Any) -> CCAConfig | None:
        """Measure a method under changed settings; return its settings of CCA."""
        given = settings_taken(method, methods, {**settings, **changes})
        loaded = load(model, method=method, **given, **vars(options))
        results[name] = measure(loaded, text, name, chunk_size)
        return loaded.config

    if compare:
        run("full", "full")
        config = run("cca", "cca")
        assert config is not None
        run("window", "window", window_size=config.window_size)
        run("streaming_llm", "streaming_llm", window_size=config.window_size)
        if not config.sink_size:
            run(f"cca sinks={CCAConfig.sink_size}", "cca", sinks=CCAConfig.sink_size)
    else:
        run(method, method)
    publish(json, lambda: print_table(results), lambda: to_records(results, model))


@with_settings(*SIZES, "cache_dtype", "fetch_groups", "fetch_index", "store", "fetch_slots")
def info(
    model: Annotated[str, typer.Option(help=MODEL_HELP)],
    settings: dict[str, Any],
    length: Annotated[
        list[int] | None,
        typer.Option(help="Prompt length; may be repeated. Default: powers of two to the limit."),
    ] = None,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Count the tokens too that vLLM's cache holds.")
    ] = False,
    gpu_memory: Annotated[
        float | None,
        typer.Option(help="Memory of the GPU in GiB: says which preset fits. Default: this one's."),
    ] = None,
    host_memory: Annotated[
        float | None,
        typer.Option(
            help="Host memory beside the GPU in GiB, for raw tokens. Default: what is available on "
            "this machine."
        ),
    ] = None,
    untested: Untested = False,
) -> None:
    """Estimate the costs and savings of CCA for a model, by length; loads no weights."""
    for value in length or ():
        check_least(1, length=value)
    from corecontext.info import print_info
    from corecontext.integrations.vllm.capacity import gpu_gib

    if host_memory is not None and not 0 <= host_memory < float("inf"):
        raise UserError(f"host_memory must be at least 0, got {host_memory}.")
    gib = gpu_gib(gpu_memory, is_needed=vllm)
    if host_memory is not None and gib is None:
        raise UserError("host_memory must be given with gpu_memory on a machine without a GPU.")
    print_info(model, settings, length, untested, gib, vllm, host_memory)
