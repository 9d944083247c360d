"""The command line of the benchmarks, with heavy imports inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from corecontext.cli.entry import application, run
from corecontext.cli.options import (
    ChunkSize,
    Device,
    Dtype,
    Force,
    GroupSize,
    Json,
    Plot,
    Seed,
    WindowSize,
)
from corecontext.files import UserError


def bench_operator(
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Sequence length; may be repeated. Default: 32768; on a GPU 1024, 2048, ... 131072."
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads. Default: 8; on a GPU 32.")] = None,
    kv_heads: Annotated[
        list[int] | None,
        typer.Option(help="Key and value heads; may be repeated. Default: 2; on a GPU 32 and 8."),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Size of a head. Default: 64; on a GPU 128.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. Default: float32; on a GPU bfloat16."),
    ] = None,
    device: Device = "auto",
    group_size: Annotated[int, typer.Option(help="Tokens per core token, g.")] = 16,
    window_size: Annotated[int, typer.Option(help="Nearest tokens kept as they are, s.")] = 1024,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="No backward pass.")] = False,
    memory_length: Annotated[
        list[int] | None,
        typer.Option(
            help="Length at which peak memory is measured; may be repeated. Default: L/4, L/2, L."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed calls; on a GPU, timed queues of calls.")] = 5,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="full, sdpa_flash, sdpa_cudnn, flash_attn_4, flex, packed (CCA by PyTorch's kernels) or "
            "cca; may be repeated. Default: full and cca; on a GPU all but full and packed."
        ),
    ] = None,
    baseline_limit_s: Annotated[
        float,
        typer.Option(help="Leave full attention out where a call would take longer than this."),
    ] = 30.0,
    flex_length: Annotated[
        list[int] | None,
        typer.Option(
            help="Length at which FlexAttention is measured; may be repeated. Default: 8192 and 32768."
        ),
    ] = None,
    decode_batch: Annotated[
        list[int] | None,
        typer.Option(
            help="Sequences decoded at once; may be repeated. Default: none; on a GPU 1, 8 and 64."
        ),
    ] = None,
    decode_length: Annotated[
        list[int] | None,
        typer.Option(
            help="Context length of decoding; may be repeated. Default: every length; on a GPU 8192, 32768 "
            "and 131072."
        ),
    ] = None,
    json: Json = None,
    plot: Plot = None,
    force: Force = False,
) -> None:
    """CCA against full causal attention on this machine: time, peak memory, decoding, and the
    floor."""
    from corecontext.files import check_output

    check_output(plot, force)
    check_output(json, force=True)  # appended to
    if plot is not None:
        from corecontext.drawing import check_plot

        check_plot(plot)
    from benchmarks.operator import run_operator_bench
    from benchmarks.operator_settings import defaults
    from benchmarks.operator_tables import print_table
    from corecontext.loading import one_line, pick_device

    given = {
        "lengths": length,
        "query_heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "memory_lengths": memory_length,
        "methods": method,
        "flex_lengths": flex_length,
        "decode_batches": decode_batch,
        "decode_lengths": decode_length,
        "passes": ["forward"] if forward_only else None,
    }
    with one_line():
        bench = defaults(
            pick_device(device),
            batch=batch,
            group_size=group_size,
            window_size=window_size,
            repeats=repeats,
            baseline_limit_s=baseline_limit_s,
            **{name: value for name, value in given.items() if value is not None and value != []},
        )
    from corecontext.record import append_records

    # What is measured is kept at once: a long run that is cut short has not been for nothing.
    records = run_operator_bench(
        bench, lambda new: append_records(json, new) if json is not None else None
    )
    if plot is not None:
        from benchmarks.figures import draw_operator

        draw_operator(records, plot)
    print_table(records)


def bench_model(
    shape: Annotated[
        str,
        typer.Option(
            help="llama2-7b, llama3.1-8b, qwen2.5-7b or tiny, with random "
            "weights; or a checkpoint's folder or identifier."
        ),
    ],
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Context length; may be repeated. Default: 2048; on a GPU 4096, 8192, ... 131072; for --sweep "
            "16384, for --throughput 32768."
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="full, sdpa_flash, sdpa_cudnn, full_rows (full attention decoding with this package's own "
            "kernel), streaming_llm, cca or cca_raw (some KV heads keep every token, at the same cache "
            "size); may be repeated. Default: full, streaming_llm and cca; on a GPU all but full and "
            "cca_raw."
        ),
    ] = None,
    what: Annotated[
        list[str] | None,
        typer.Option(
            help="ftl (first token, peak memory, cache) or itl (next tokens); may be repeated. Default: both."
        ),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="CCA by group and window size.")] = False,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Tokens per second at the best batch that fits.")
    ] = False,
    group_size: Annotated[int, typer.Option(help="Tokens per core token, g.")] = 16,
    window_size: Annotated[int, typer.Option(help="Nearest tokens kept as they are, s.")] = 1024,
    cache_dtype: Annotated[str, typer.Option(help="auto, int8 or fp8: CCA's cache.")] = "auto",
    fuse: Annotated[
        list[str],
        typer.Option(
            help="none, or compile for CCA with its elementwise work fused; may be repeated."
        ),
    ] = ["none"],
    chunk_size: ChunkSize = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. Default: float32; on a GPU bfloat16."),
    ] = None,
    device: Device = "auto",
    repeats: Annotated[int, typer.Option(help="Samples of each value.")] = 3,
    steps: Annotated[int | None, typer.Option(help="Tokens of one sample of next tokens.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Largest batch of --throughput.")] = None,
    baseline_limit_s: Annotated[
        float,
        typer.Option(help="Leave full attention out where a prompt would take longer than this."),
    ] = 60.0,
    json: Json = None,
    plot: Plot = None,
    force: Force = False,
) -> None:
    """Whole models, CCA against full attention and StreamingLLM: first token, next token, memory,
    throughput."""
    from corecontext.files import check_output

    if sweep and throughput:
        raise UserError(
            "sweep and throughput must be asked for one at a time, got both. Run the command twice."
        )
    check_output(plot, force)
    check_output(json, force=True)  # appended to
    if plot is not None:
        from corecontext.drawing import check_plot

        check_plot(plot)
    from benchmarks.model import run_model_bench
    from benchmarks.model_settings import model_defaults
    from benchmarks.model_tables import print_model
    from corecontext.loading import one_line, pick_device
    from corecontext.record import append_records

    given = {
        "lengths": length,
        "methods": method,
        "what": what,
        "dtype": dtype,
        "steps": steps,
        "max_batch": max_batch,
    }
    with one_line():
        bench = model_defaults(
            pick_device(device),
            shape,
            mode="sweep" if sweep else "throughput" if throughput else "lengths",
            group_size=group_size,
            window_size=window_size,
            cache_dtype=cache_dtype,
            fuses=fuse,
            chunk_size=chunk_size,
            repeats=repeats,
            baseline_limit_s=baseline_limit_s,
            **{name: value for name, value in given.items() if value is not None and value != []},
        )
    # What is measured is kept at once: a long run that is cut short has not been for nothing.
    records = run_model_bench(
        bench, lambda new: append_records(json, new) if json is not None else None
    )
    if plot is not None:
        from benchmarks.figures import draw_model, draw_sweep

        (draw_sweep if sweep else draw_model)(records, plot)
    print_model(records)


def bench_train(
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of a sequence, or of each process's part; may be repeated. Default: 1024 and 4096; on "
            "a GPU 8192, 32768, 131072, 262144, 524288."
        ),
    ] = None,
    shape: Annotated[
        str, typer.Option(help="llama-1b, llama2-7b, llama3.1-8b, qwen2.5-7b or tiny.")
    ] = "llama-1b",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="cca, full, sdpa_flash, sdpa_cudnn, cca_raw (some KV heads keep every token, at the same "
            "cache size) or cca_default (these, and distilled, as corecontext train does by default); may "
            "be repeated. Default: cca and the full attention that suits."
        ),
    ] = None,
    context_parallel: Annotated[
        bool,
        typer.Option(
            "--context-parallel", help="One sequence on all processes that torchrun started."
        ),
    ] = False,
    group_size: Annotated[int, typer.Option(help="Tokens per core token, g.")] = 16,
    window_size: Annotated[int, typer.Option(help="Nearest tokens kept as they are, s.")] = 1024,
    repeats: Annotated[
        int, typer.Option(help="Steps that are timed, after those that warm up.")
    ] = 5,
    limit_s: Annotated[
        float, typer.Option(help="Leave a method out where a step would take longer.")
    ] = 60,
    fuse: Annotated[
        bool, typer.Option("--fuse", help="Compile norms, MLPs and rotation, for every method.")
    ] = False,
    device: Device = "auto",
    json: Json = None,
    plot: Plot = None,
    force: Force = False,
) -> None:
    """Tokens per second and peak memory of a full fine-tuning step, with CCA and with full
    attention."""
    from corecontext.files import check_output

    check_output(plot, force)
    check_output(json, force=True)  # appended to
    if plot is not None:
        from corecontext.drawing import check_plot

        check_plot(plot)
    from benchmarks.training import LENGTHS, TrainingBench, run_training_bench
    from benchmarks.training_figure import draw_training, print_training
    from corecontext.loading import one_line, pick_device
    from corecontext.record import append_records, read_records

    device = pick_device(device)
    with one_line():
        bench = TrainingBench(
            device,
            length or LENGTHS["cuda" if device.startswith("cuda") else "cpu"],
            shape,
            method or (),
            group_size,
            window_size,
            repeats,
            limit_s,
            context_parallel,
            fuse,
        )
    records = run_training_bench(
        bench, lambda new: append_records(json, new) if json is not None else None
    )
    if not records:  # another process has them
        return
    if json is not None:  # what was measured before belongs to the same picture
        records = read_records(json)
    if plot is not None:
        draw_training(records, plot)
    print_training(records)


def bench_serve(
    mode: Annotated[
        str,
        typer.Option(
            help="day: a day-shaped curve; rising: rate after rate until the "
            "median wait for the first token passes the limit; saturated: "
            "all requests at once."
        ),
    ] = "day",
    variant: Annotated[
        list[str], typer.Option(help="elastic, fixed, cca:G:S or full; may be repeated.")
    ] = ["elastic", "fixed"],
    model: Annotated[str | None, typer.Option(help="As for serve.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="llama3.1-8b: a model of these sizes with random weights.")
    ] = None,
    prompt_length: Annotated[
        int, typer.Option(help="Tokens of each prompt; all are distinct.")
    ] = 1024,
    shared_length: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    seconds: Annotated[float, typer.Option(help="Of the day, or of each rate.")] = 240.0,
    base_rate: Annotated[
        float, typer.Option(help="Requests a second at night, or at first.")
    ] = 0.2,
    peak_rate: Annotated[
        float, typer.Option(help="Requests a second at the peak, or at last.")
    ] = 2.0,
    growth: Annotated[float, typer.Option(help="Of a rising load, from rate to rate.")] = 1.25,
    first_token_limit: Annotated[
        float, typer.Option(help="Seconds at which a rising load ends.")
    ] = 2.0,
    requests: Annotated[int, typer.Option(help="Of a saturated server.")] = 32,
    seed: Seed = 0,
    group_size: GroupSize = None,
    window_size: WindowSize = None,
    cache_mib: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    max_running: Annotated[int, typer.Option(help="As for serve.")] = 64,
    rows_per_pool: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="As for serve.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json: Json = None,
    plot: Plot = None,
    force: Force = False,
) -> None:
    """Latency, throughput and chosen g and s of a server under load; needs the extra 'serve' and
    httpx."""
    from corecontext.files import check_output

    check_output(plot, force)
    check_output(json, force=True)  # appended to
    if plot is not None:
        from corecontext.drawing import check_plot

        check_plot(plot)
        if mode == "saturated":
            raise UserError(
                "plot must be left out for a saturated server: it gives one number for each variant."
            )
    from benchmarks.serving import ServeBench, print_table, run_serve_bench
    from corecontext.loading import one_line
    from corecontext.record import append_records

    with one_line():
        bench = ServeBench(
            mode,
            tuple(variant),
            model,
            shape,
            prompt_length,
            shared_length,
            new_tokens,
            seconds,
            base_rate,
            peak_rate,
            growth,
            first_token_limit,
            requests,
            seed,
            group_size,
            window_size,
            cache_mib,
            max_running,
            rows_per_pool,
            chunk_size,
            dtype,
            device,
        )
    records = run_serve_bench(
        bench, lambda new: append_records(json, new) if json is not None else None
    )
    if plot is not None:
        from benchmarks.serving_figure import draw_serve

        draw_serve(records, plot)
    print_table(records)


COMMANDS: dict[str, Callable[..., None]] = {
    "operator": bench_operator,
    "model": bench_model,
    "train": bench_train,
    "serve": bench_serve,
}


def _top() -> None:
    """Measure speed and memory on this machine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns its exit code."""
    return run(application(COMMANDS, _top), "python -m benchmarks", argv)
