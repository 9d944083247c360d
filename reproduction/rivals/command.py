"""The command line of the comparison with kvpress."""

from typing import Annotated

import typer

from corecontext.cli.options import MODEL_HELP, Device, Dtype, Seed
from corecontext.files import UserError
from reproduction.published import (
    LimitMinutes,
    ListRows,
    Only,
    check_options,
    list_pending,
    measure_pending,
    with_text,
)
from reproduction.rivals.tasks import Counts

DEFAULT = Counts()


def rivals(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    data: Annotated[
        str,
        typer.Option(help="Folder with haystack_essays and the files of RULER and multidoc_qa."),
    ] = "",
    method: Annotated[
        list[str] | None,
        typer.Option(help="May be repeated. Default: full attention and all of this environment."),
    ] = None,
    compression: Annotated[
        list[int], typer.Option(help="Entries for each that stays; may be repeated.")
    ] = [4, 8, 16],
    full: Annotated[
        str | None,
        typer.Option(help="Records of full attention: ask only what it answers half right."),
    ] = None,
    full_heads: Annotated[
        str | None,
        typer.Option(
            help="KV heads that may keep every token (_raw_heads), the best first, as "
            "LAYER:HEAD,... Default: found on lm_train."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name in the records.")] = None,
    trained_by: Annotated[
        str | None, typer.Option(help="The attention that the model was trained under.")
    ] = None,
    trained_tokens: Annotated[int, typer.Option(help="Tokens of that training.")] = 0,
    trained_index: Annotated[
        str | None, typer.Option(help="Index of fetch in that training.")
    ] = None,
    needles: Annotated[int, typer.Option(help="Needles of each length.")] = DEFAULT.needles,
    needle_length: Annotated[
        list[int], typer.Option(help="Tokens of a needle's prompt; may be repeated.")
    ] = [4000, 7900],
    lists: Annotated[int, typer.Option(help="Lists of values.")] = DEFAULT.lists,
    ruler: Annotated[int, typer.Option(help="Questions of each task of RULER.")] = DEFAULT.ruler,
    ruler_length: Annotated[int, typer.Option(help="Their tokens.")] = DEFAULT.ruler_length,
    passages: Annotated[int, typer.Option(help="Questions about passages.")] = DEFAULT.passages,
    documents: Annotated[int, typer.Option(help="Their passages.")] = DEFAULT.documents,
    first_tokens: Annotated[
        int, typer.Option(help="Only measure the time to the first token, so many times.")
    ] = 0,
    published: Annotated[
        bool,
        typer.Option(
            "--published",
            help="Measure the cells of docs/real-model.md that have no record in the output yet, "
            "as far as this environment can.",
        ),
    ] = False,
    limit_minutes: LimitMinutes = None,
    list_rows: ListRows = False,
    only: Only = "",
    save: Annotated[
        str | None,
        typer.Option(help="With --published: folder for trained models, shared with real."),
    ] = None,
    seed: Seed = 0,
    output: Annotated[str, typer.Option(help="File that records are appended to.")] = (
        "results/rivals.jsonl"
    ),
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Contexts that full attention has read and kvpress's presses or this package's caches
    compress, before the question is known (docs/real-model.md)."""
    from importlib.util import find_spec

    from corecontext.cli.options import check_appended, check_least
    from reproduction.real.methods import Sizes
    from reproduction.real.model import Protocol, RealModel
    from reproduction.real.training import Adaptation
    from reproduction.rivals import plan
    from reproduction.rivals.compare import OWN, PRESSED, Comparison, cells_of, compare
    from reproduction.rivals.published import pending_rows

    check_appended(output)
    check_options(context, ("model", "data", "save", "output", "dtype", "device"))
    if not data and not list_rows:
        raise UserError("data must be given, got none. Use --data FOLDER.")
    if published:
        protocol = Protocol(model, data, output, save=save, dtype=dtype, device=device)
        pending = with_text(pending_rows(protocol, plan.ROWS), only)
        if list_rows:
            list_pending(pending)
        else:
            measure_pending(pending, limit_minutes)
        return
    check_least(0, needles=needles, lists=lists, ruler=ruler, passages=passages)
    check_least(0, trained_tokens=trained_tokens, first_tokens=first_tokens)
    check_least(1, documents=documents)
    check_least(2, compression=min(compression))
    counts = Counts(needles, tuple(needle_length), lists, ruler, ruler_length, passages, documents)
    # Heads are searched for at the least compression, which has room for the most of them.
    length = Sizes.length
    group_size = 2 * min(compression)
    sizes = Sizes(length, group_size, length // group_size, core_mass=True)
    protocol = Protocol(model, data, output, full_heads=full_heads, dtype=dtype, device=device)
    real = RealModel(protocol, sizes, Adaptation(0, seed=seed))
    comparison = Comparison(
        name or real.name,
        trained_by,
        trained_tokens,
        counts,
        full,
        first_tokens,
        output,
        seed,
        trained_index=trained_index,
    )
    methods = method or ("full", *(PRESSED if find_spec("kvpress") else OWN))
    compare(real, comparison, cells_of(methods, compression))
