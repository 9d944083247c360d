"""Commands that make or serve models, with heavy imports inside."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from corecontext.cli.options import Device, Dtype, GroupSize, Method, Sinks, WindowSize
from corecontext.files import UserError


def convert(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint.")],
    output: Annotated[str, typer.Argument(help="New folder.")],
    method: Method = "cca",
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    sinks: Sinks = None,
) -> None:
    """Copy a checkpoint so that it loads with CCA at g and s, or (--method full) as the ordinary
    model again."""
    from corecontext.loading import METHODS, cca_config, check_architecture, load_config

    if method not in METHODS:
        raise UserError(f"method must be {' or '.join(METHODS)}, got {method!r}.")
    hf_config = load_config(model)
    check_architecture(hf_config)
    from corecontext.train.run import convert as run

    run(
        model,
        output,
        cca_config(hf_config, group_size, window_size, sinks=sinks) if method == "cca" else None,
    )
    print(f"wrote {output}")


def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder in the Hugging Face format, or an identifier "
            "on the hub. Default: the bundled model."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model. Default: the last part of --model."),
    ] = None,
    method: Annotated[
        str, typer.Option(help="cca, or full for full attention from a static cache.")
    ] = "cca",
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    sinks: Sinks = None,
    policy: Annotated[
        str,
        typer.Option(
            help="g and s of requests that choose none: elastic (by the load), "
            "fixed (the model's), or module:function."
        ),
    ] = "elastic",
    first_token_limit: Annotated[
        float, typer.Option(help="Seconds to the first token at which elastic compresses most.")
    ] = 2.5,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="0 takes a free one, which the first log line names.")
    ] = 8000,
    api_key_file: Annotated[
        str | None,
        typer.Option(
            help="File with the key that clients must send. Default: "
            "the variable CORECONTEXT_API_KEY; none: no key."
        ),
    ] = None,
    cache_mib: Annotated[
        int | None, typer.Option(help="Budget of all caches, MiB. Default: by the free memory.")
    ] = None,
    max_running: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
    rows_per_pool: Annotated[
        int | None,
        typer.Option(help="Slots of cache allocated at once. Default: 8; on a GPU 16."),
    ] = None,
    queue_limit: Annotated[int, typer.Option(help="Requests that may wait; more get 429.")] = 256,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt read between two steps. Default: 256; on a GPU 2048."
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer. Default: the model's.")
    ] = None,
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", help="Seconds after which a request is ended.")
    ] = 600.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights",
            help="Make weights up; --model needs only config.json. For benchmarks.",
        ),
    ] = False,
    tensor_parallel: Annotated[
        int,
        typer.Option(help="Processes of this machine, a GPU each, that the model is split over."),
    ] = 1,
) -> None:
    """Serve a model to many users by the OpenAI protocol; needs the extra 'serve'."""
    from corecontext.files import read_text
    from corecontext.serve.build import run
    from corecontext.serve.settings import Serving

    settings = dict(ctx.params, api_key=os.environ.get("CORECONTEXT_API_KEY") or None)
    del settings["api_key_file"]
    if api_key_file is not None:
        settings["api_key"] = read_text(api_key_file).strip()
    code = run(Serving(**settings))
    if code:
        raise typer.Exit(code)
