"""The command line of the measurements on a pretrained model."""

from typing import Annotated

import typer

from corecontext.cli.options import MODEL_HELP, Device, Dtype, Seed
from corecontext.config import listed
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
from reproduction.real.methods import METHODS, WITH_HEADS, Sizes
from reproduction.real.training import DISTIL, Adaptation

DEFAULT_METHODS = ("full", "streaming_llm", "streaming_llm_wide", "cca_paper", "cca")


def real(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    data: Annotated[
        str, typer.Option(help="Folder with lm_test, lm_train and haystack_essays (.jsonl, .xz).")
    ] = "",
    method: Annotated[
        list[str],
        typer.Option(help=f"{listed(tuple(METHODS))}; may be repeated."),
    ] = list(DEFAULT_METHODS),
    steps: Annotated[
        int, typer.Option(help="Training steps before the measurement; 0 measures the model.")
    ] = 0,
    group_size: Annotated[int, typer.Option(help="Tokens per core token, g.")] = Sizes.group_size,
    window_size: Annotated[int, typer.Option(help="Nearest tokens kept as they are, s.")] = 512,
    sink_size: Annotated[int, typer.Option(help="First tokens kept as they are.")] = 16,
    core_mass: Annotated[
        bool, typer.Option("--core-mass", help="Add the entropy of its weights to a core's score.")
    ] = False,
    fetch_groups: Annotated[int, typer.Option(help="Groups that a query fetches.")] = 32,
    fetch_index: Annotated[str, typer.Option(help="Index by which groups are chosen.")] = (
        Sizes.fetch_index
    ),
    fetch_group_size: Annotated[
        int | None, typer.Option(help="Tokens per group of fetch_equal_bytes. Default: as CCA's.")
    ] = None,
    store: Annotated[str, typer.Option(help="Where fetch keeps raw tokens.")] = Sizes.store,
    fetch_slots: Annotated[
        int, typer.Option(help="Slots of fetched groups on the device, with --store host; 0: none.")
    ] = Sizes.fetch_slots,
    train_text: Annotated[str, typer.Option(help="Name of the file of training text.")] = (
        "lm_train"
    ),
    full_heads: Annotated[
        str | None,
        typer.Option(
            help=f"KV heads that keep every token ({', '.join(WITH_HEADS)}), as LAYER:HEAD,... "
            "Default: found on lm_train, as many as the bytes of CCA allow."
        ),
    ] = None,
    head_needles: Annotated[
        int, typer.Option(help="Search for these heads by so many needles; 0: by far perplexity.")
    ] = 0,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 8192,
    windows: Annotated[int, typer.Option(help="Windows, each of another document.")] = 32,
    needles: Annotated[int, typer.Option(help="Needles of each length.")] = 25,
    needle_length: Annotated[
        list[int], typer.Option(help="Tokens of a needle's prompt; may be repeated.")
    ] = [4000, 7900],
    lists: Annotated[int, typer.Option(help="Lists of values to be given back.")] = 10,
    hit_steps: Annotated[
        int,
        typer.Option(
            help="Count hits of slots for fetched groups in so many last tokens of a window."
        ),
    ] = 0,
    next_tokens: Annotated[
        int,
        typer.Option(
            help="Measure so many last tokens of a window alone, behind prompts that are read in "
            "several ways."
        ),
    ] = 0,
    rows: Annotated[int, typer.Option(help="Windows of a training step.")] = 8,
    rows_at_once: Annotated[int, typer.Option(help="Windows of a forward pass in training.")] = 4,
    checkpointing: Annotated[
        bool, typer.Option(help="Recompute activations in training: less memory, more work.")
    ] = False,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Compile parts of the model for training.")
    ] = False,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-4,
    distil: Annotated[
        float, typer.Option(help="Share of the divergence from the original model in the loss.")
    ] = DISTIL,
    strategy: Annotated[
        str, typer.Option(help="Weights that are trained: full, partial (q, k, v) or lora.")
    ] = "full",
    lora_rank: Annotated[int, typer.Option(help="Rank of LoRA's matrices.")] = 12,
    rope_theta: Annotated[
        float | None,
        typer.Option(help="New rotary base, for windows (--length) beyond the model's."),
    ] = None,
    seed: Seed = 0,
    output: Annotated[str, typer.Option(help="File that records are appended to.")] = (
        "results/real.jsonl"
    ),
    save: Annotated[
        str | None,
        typer.Option(help="Folder for trained models; one that is there is not trained again."),
    ] = None,
    gains: Annotated[
        bool, typer.Option("--gains", help="Only compute gains from the records in the output.")
    ] = False,
    published: Annotated[
        bool,
        typer.Option(
            "--published",
            help="Measure the rows of docs/real-model.md that have no record in the output yet.",
        ),
    ] = False,
    limit_minutes: LimitMinutes = None,
    list_rows: ListRows = False,
    only: Only = "",
    cache: Annotated[bool, typer.Option(help="Measure the bytes of caches.")] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Attentions on a pretrained model: far perplexity, needles and lists, as it is or trained
    for some steps (docs/real-model.md)."""
    from dataclasses import fields
    from pathlib import Path

    from corecontext.cli.options import check_appended, check_least
    from reproduction.real import plan
    from reproduction.real.gains import append_gains
    from reproduction.real.model import Protocol, RealModel
    from reproduction.real.published import pending_rows

    check_appended(output)
    check_options(context, ("model", "data", "output", "save", "dtype", "device"))
    if not data and not gains and not list_rows:
        raise UserError("data must be given, got none. Use --data FOLDER.")
    if published:
        protocol = Protocol(model, data, output, save=save, dtype=dtype, device=device)
        pending = with_text(pending_rows(protocol, plan.rows_of(model)), only)
        if list_rows:
            list_pending(pending)
            return
        try:
            measure_pending(pending, limit_minutes)
        finally:
            if Path(output).exists():
                append_gains(output, window_size)
        return
    for name in method:
        if name not in METHODS:
            raise UserError(f"method must be {listed(tuple(METHODS))}, got {name!r}.")
    check_least(0, steps=steps, needles=needles, lists=lists, head_needles=head_needles)
    check_least(0, hit_steps=hit_steps, next_tokens=next_tokens)
    check_least(1, windows=windows, rows=rows, rows_at_once=rows_at_once)
    check_least(2, length=length)
    if not gains:
        # Each field is the option of its name, as far as there is one.
        given = {**context.params, "needle_lengths": tuple(needle_length)}
        protocol, sizes, adaptation = (
            kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})
            for kind in (Protocol, Sizes, Adaptation)
        )
        RealModel(protocol, sizes, adaptation).run(method)
    append_gains(output, window_size)
