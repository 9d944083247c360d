"""Commands that make or serve models. Heavy imports are inside, so that help is fast."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from corecontext.cli.options import (
    MODEL_HELP,
    SIZES,
    Method,
    Untested,
    unpacked,
    with_options,
    with_settings,
)
from corecontext.files import UserError
from corecontext.serve.settings import SERVED, Serving


@with_settings(*SIZES)
def convert(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, callback=unpacked)],
    output: Annotated[str, typer.Argument(help="New folder.")],
    settings: dict[str, Any],
    method: Method = "cca",
    untested: Untested = False,
) -> None:
    """Copy a checkpoint so that it loads with CCA at g and s, or (--method full) as the ordinary
    model again."""
    from corecontext.loading import check_architecture, load_config
    from corecontext.methods import METHODS, cca_config, check_settings

    if method not in METHODS:
        raise UserError(f"method must be {' or '.join(METHODS)}, got {method!r}.")
    check_settings(method, settings)
    hf_config = load_config(model)
    check_architecture(hf_config, untested)
    from corecontext.train.conversion import convert as run

    config = None
    if method == "cca":
        config = cca_config(hf_config, settings)
    run(model, output, config)
    print(f"wrote {output}")


@with_options(Serving)
@with_settings(*SERVED)
def serve(options: Serving, settings: dict[str, Any]) -> None:
    """Serve a model to many users by the OpenAI protocol; needs the extra 'serve'."""
    from corecontext.serve.build import run

    code = run(replace(options, settings=settings))
    if code:
        raise typer.Exit(code)
