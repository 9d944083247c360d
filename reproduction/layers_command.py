"""The command line of the search for layers and heads: `python -m reproduction layers`."""

import os
from typing import Annotated, Any

import typer

from corecontext.cli.options import (
    SIZES,
    Json,
    LoadOptions,
    Model,
    check_appended,
    check_least,
    publish,
    with_options,
    with_settings,
)
from corecontext.files import UserError, read_text
from corecontext.methods import PRESET
from corecontext.train.conversion import check_copy, convert


@with_options(LoadOptions)
@with_settings(*SIZES)
def layers(
    file: Annotated[str, typer.Argument(help="Text like that to come, or - for standard input.")],
    model: Model,
    options: LoadOptions,
    settings: dict[str, Any],
    length: Annotated[
        int, typer.Option(help="Tokens of a row; the model's trained length or less.")
    ] = 8192,
    rows: Annotated[int, typer.Option(help="Most rows of the text.")] = 4,
    heads: Annotated[
        bool, typer.Option("--heads", help="Choose KV heads, in the best quarter of the layers.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option(
            help="Layers, or heads, to choose. Default: an eighth of the layers, a sixteenth of "
            "all heads; with --raw at most what takes half of the cache."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="The chosen keep every token; the window shrinks for it.")
    ] = False,
    needles: Annotated[
        bool,
        typer.Option(
            "--needles",
            help="Search by the answers to rows that ask for a number hidden in the text, in place "
            "of the second halves of rows.",
        ),
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(help="New folder: a copy of the checkpoint that loads with these sizes."),
    ] = None,
    json: Json = None,
) -> None:
    """Find the layers or KV heads that need small groups, or every token, at the same cache
    size."""
    check_least(1, rows=rows)
    check_least(2, length=length)
    check_appended(json)
    text = read_text(file)
    if output is not None:
        check_copy(model, output)
    from corecontext.loading import load, load_config
    from corecontext.record import device_name
    from reproduction.layers import find_layers, layer_records, print_layers

    # Sizes by layer are a matter of core tokens: a checkpoint that says nothing has no fetch here.
    if getattr(load_config(model), "cca", None) is None:
        settings = {PRESET: "pooling", **settings}

    loaded = load(model, **settings, **vars(options))
    config = loaded.config
    if raw and "window_size" not in settings and config is not None and config.varies:
        raise UserError(
            "window-size must be given with --raw for a checkpoint that has sizes by layer or "
            f"head, whose window of {config.window_size} may have paid for heads already; "
            "got none. Use --window-size."
        )
    choice = find_layers(loaded, text, length, rows, count, heads, raw, needles)
    name = os.path.basename(os.path.normpath(model))
    params = {"model": name, **loaded.sizes(), "length": length}
    if needles:
        params["by"] = "needles"
    device = device_name(str(loaded.model.device))
    publish(
        json,
        lambda: print_layers(choice, needles=needles),
        lambda: layer_records(choice.search.trials, params, device),
    )
    if output is not None:
        convert(model, output, choice.config)
        print(f"wrote {output}")
