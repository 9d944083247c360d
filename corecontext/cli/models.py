"""Commands that make or serve models, with heavy imports inside."""

from __future__ import annotations

from typing import Annotated

import typer

from corecontext.cli.options import (
    MODEL_HELP,
    CoreMass,
    GroupSize,
    Method,
    Sinks,
    Untested,
    WindowSize,
    unpacked,
    with_options,
)
from corecontext.files import UserError
from corecontext.serve.settings import Serving


def convert(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, callback=unpacked)],
    output: Annotated[str, typer.Argument(help="New folder.")],
    method: Method = "cca",
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    sinks: Sinks = None,
    core_mass: CoreMass = None,
    untested: Untested = False,
) -> None:
    """Copy a checkpoint so that it loads with CCA at g and s, or (--method full) as the ordinary
    model again."""
    from corecontext.loading import check_architecture, load_config
    from corecontext.methods import METHODS, AttentionSizes, cca_config, check_sizes

    if method not in METHODS:
        raise UserError(f"method must be {' or '.join(METHODS)}, got {method!r}.")
    sizes = AttentionSizes(group_size, window_size, sinks, core_mass=core_mass)
    check_sizes(method, sizes)
    hf_config = load_config(model)
    check_architecture(hf_config, untested)
    from corecontext.train.conversion import convert as run

    config = None
    if method == "cca":
        config = cca_config(hf_config, sizes)
    run(model, output, config)
    print(f"wrote {output}")


@with_options(Serving)
def serve(options: Serving) -> None:
    """Serve a model to many users by the OpenAI protocol; needs the extra 'serve'."""
    from corecontext.serve.build import run

    code = run(options)
    if code:
        raise typer.Exit(code)
