"""The command line of the comparison of indices on a pretrained model."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from corecontext.cli.options import MODEL_HELP, Device, Dtype, Seed
from corecontext.files import UserError
from reproduction.real.methods import Sizes
from reproduction.real.training import Adaptation

DEFAULT_INDICES = (*("mean", "parts:4:4", "parts:16:1", "pairs:2", "bits:2", "bits:2@32"),)


def indices(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    data: Annotated[
        str, typer.Option(help="Folder with lm_test, lm_train and haystack_essays (.jsonl, .xz).")
    ] = "",
    index: Annotated[
        list[str],
        typer.Option(help="An index, or INDEX@g for groups of g tokens; may be repeated."),
    ] = list(DEFAULT_INDICES),
    tokens: Annotated[
        list[int], typer.Option(help="Raw tokens that a query fetches; may be repeated.")
    ] = [512, 1024],
    group_size: Annotated[int, typer.Option(help="Tokens of a group, g.")] = Sizes.group_size,
    window_size: Annotated[int, typer.Option(help="Nearest tokens kept as they are, s.")] = 512,
    sink_size: Annotated[int, typer.Option(help="First tokens kept as they are.")] = 16,
    equal_bytes: Annotated[
        bool,
        typer.Option(
            "--equal-bytes",
            help="Raw tokens on the host, and the window narrowed to the bytes of CCA.",
        ),
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Measure full attention, too.")] = False,
    recall_windows: Annotated[
        int, typer.Option(help="Windows of the recall; 0 leaves it out.")
    ] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 8192,
    windows: Annotated[
        int, typer.Option(help="Windows of the far perplexity; 0 leaves it out.")
    ] = 32,
    needles: Annotated[int, typer.Option(help="Needles of each length.")] = 0,
    needle_length: Annotated[
        list[int], typer.Option(help="Tokens of a needle's prompt; may be repeated.")
    ] = [4000, 7900],
    lists: Annotated[int, typer.Option(help="Lists of values to be given back.")] = 0,
    rows_at_once: Annotated[int, typer.Option(help="Windows of a forward pass.")] = 8,
    seed: Seed = 0,
    output: Annotated[str, typer.Option(help="File that records are appended to.")] = (
        "results/real.jsonl"
    ),
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Indices of fetch on a pretrained model: recall of the groups with the largest masses, far
    perplexity and needles (docs/fetch.md)."""
    from corecontext.cli.options import check_appended, check_least
    from reproduction.indices.study import IndexStudy
    from reproduction.real.model import Protocol, RealModel

    check_appended(output)
    check_least(0, needles=needles, lists=lists, recall_windows=recall_windows)
    check_least(0, windows=windows)
    check_least(1, rows_at_once=rows_at_once)
    if not data:
        raise UserError("data must be given, got none. Use --data FOLDER.")
    protocol = Protocol(
        model,
        data,
        output,
        windows=max(1, windows, recall_windows),
        needles=needles,
        needle_lengths=tuple(needle_length),
        lists=lists,
        dtype=dtype,
        device=device,
    )
    sizes = Sizes(length, group_size, window_size, sink_size, core_mass=True)
    real = RealModel(protocol, sizes, Adaptation(0, seed=seed))
    study = IndexStudy(real, rows_at_once)
    settings: list[Any] = []
    for name in index:
        name, _, size = name.partition("@")
        g = int(size or group_size)
        of_index = replace(real.sizes, fetch_index=name)
        config = of_index.fetch().replace(group_size=g)
        if equal_bytes:
            config = of_index.fetch_equal_bytes(g)
        counts = [max(1, count // g) for count in tokens]
        settings += [config.replace(fetch_groups=count) for count in counts]
    if recall_windows:
        study.recall(settings, recall_windows)
    for setting in (*settings, *([None] if full else [])):
        study.measure(setting, windows)
