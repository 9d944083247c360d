"""The command line: one table of commands. Heavy imports stay inside the commands, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Optional

import typer

from corecontext.text import UserError

# typer reads these annotations at run time on Python 3.10 as well, hence Optional.
Model = Annotated[str, typer.Option(help="Folder in the Hugging Face format, or an identifier on the hub.")]
GroupSize = Annotated[Optional[int], typer.Option(help="Tokens per core token, g. Default: the checkpoint's, else 16.")]
WindowSize = Annotated[Optional[int], typer.Option(help="Nearest tokens kept as they are, s. Default: the checkpoint's,"
                                                        " else 1024.")]
Method = Annotated[str, typer.Option(help="cca, or full for the model's own attention.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
Json = Annotated[Optional[str], typer.Option("--json", help="Append the measured values to this file, one JSON line "
                                                           "each.")]
Plot = Annotated[Optional[str], typer.Option("--plot", help="Draw a figure (.png, .svg or .pdf); needs the extra "
                                                           "'plot'.")]


def demo(max_tokens: Annotated[Optional[int], typer.Option(help="Cut the document to this many tokens.")] = None,
         group_size: Annotated[int, typer.Option(help="Tokens per core token, g.")] = 16,
         window_size: Annotated[int, typer.Option(help="Nearest tokens kept as they are, s.")] = 512,
         questions: Annotated[int, typer.Option(help="Facts to plant and ask for.")] = 6,
         dtype: Dtype = "auto", device: Device = "auto", plot: Plot = None, json: Json = None,
         force: Force = False) -> None:
    """Full attention and CCA side by side on a bundled model and document: time, memory, perplexity, retrieval."""
    from corecontext.text import check_output

    check_output(plot, force)
    check_output(json, force=True)  # appended to
    if plot is not None:
        from corecontext.bench.figures import check_plot
        check_plot(plot)
    from corecontext.demo.report import print_report
    from corecontext.demo.run import DemoSettings, run_demo
    from corecontext.record import append_records

    result = run_demo(DemoSettings(group_size, window_size, questions, max_tokens, dtype=dtype, device=device))
    if json is not None:
        append_records(json, result.records)
    if plot is not None:
        from corecontext.bench.figures import draw_demo
        draw_demo(result.records, plot)
    print_report(result)


def generate(model: Model, prompt_file: Annotated[str, typer.Option(help="Text to continue, or - for standard input.")],
             max_new_tokens: Annotated[int, typer.Option(help="Most tokens to make.")] = 128,
             temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; more samples.")] = 0.0,
             seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0, method: Method = "cca",
             group_size: GroupSize = None, window_size: WindowSize = None,
             chunk_size: Annotated[Optional[int], typer.Option(help="Tokens of the prompt read at once; bounds the "
                                                                    "memory. Default: by the free memory.")] = None,
             dtype: Dtype = "auto", device: Device = "auto",
             output: Annotated[Optional[str], typer.Option(help="Write here instead of standard output.")] = None,
             force: Force = False) -> None:
    """Continue a text, printing it as it is made."""
    from corecontext.text import check_output, read_text, write_text

    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens must be at least 1, got {max_new_tokens}.")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature must be at least 0, got {temperature}.")
    if chunk_size is not None and chunk_size < 1:
        raise UserError(f"chunk-size must be at least 1, got {chunk_size}.")
    check_output(output, force)
    prompt = read_text(prompt_file)
    from corecontext.generation import generate as run
    from corecontext.loading import encode, load
    from corecontext.terminal import progress

    loaded = load(model, method=method, group_size=group_size, window_size=window_size, dtype=dtype, device=device)
    input_ids = encode(loaded, prompt, room_for=max_new_tokens)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed,
                               "chunk_size": chunk_size}
    if output is None:
        run(loaded, input_ids, on_text=lambda text: print(text, end="", flush=True), **options)
        print()
        return
    pieces: list[str] = []
    with progress(f"prompt of {input_ids.shape[1]} tokens, then {max_new_tokens} new ones", max_new_tokens) as advance:
        def keep(text: str) -> None:
            pieces.append(text)
            advance(1)
        run(loaded, input_ids, on_text=keep, **options)
    write_text(output, "".join(pieces))


def perplexity(file: Annotated[str, typer.Argument(help="Text, or - for standard input.")], model: Model,
               method: Method = "cca",
               compare: Annotated[bool, typer.Option("--compare", help="Measure full attention and CCA.")] = False,
               group_size: GroupSize = None, window_size: WindowSize = None,
               chunk_size: Annotated[int, typer.Option(help="Tokens per forward pass; bounds the memory.")] = 1024,
               dtype: Dtype = "auto", device: Device = "auto", json: Json = None) -> None:
    """Perplexity of a whole text in one causal pass, by position."""
    from corecontext.text import check_output, read_text

    if chunk_size < 1:
        raise UserError(f"chunk-size must be at least 1, got {chunk_size}.")
    check_output(json, force=True)  # appended to
    text = read_text(file)
    from corecontext.loading import METHODS, encode, load
    from corecontext.perplexity import Perplexity, document_nll, print_table, to_records
    from corecontext.terminal import progress

    found = {}
    for one in METHODS[::-1] if compare else (method,):
        loaded = load(model, method=one, group_size=group_size, window_size=window_size, dtype=dtype, device=device)
        input_ids = encode(loaded, text, at_least=2)
        with progress(f"{one}, {input_ids.shape[1]} tokens", input_ids.shape[1]) as advance:
            nll = document_nll(loaded.model, input_ids, chunk_size=chunk_size, on_chunk=advance)
        found[one] = Perplexity(nll, len(text.encode()), loaded.sizes())
    if json is not None:
        from corecontext.record import append_records
        append_records(json, to_records(found, model))
    print_table(found)


DATA_HELP = "Folder with the task's files (docs/evaluation.md), or TASK=PATH; may be repeated."
Tasks = Annotated[list[str], typer.Option(help="perplexity, multidoc_qa, ruler, mmlu or longbench; may be repeated.")]
Data = Annotated[list[str], typer.Option(help=DATA_HELP)]
Lengths = Annotated[Optional[list[int]], typer.Option(help="Tokens; may be repeated. Of a window (perplexity), of "
                                                           "prompt and answer (ruler), of a prompt before its middle "
                                                           "is cut (longbench).")]
Documents = Annotated[Optional[list[int]], typer.Option(help="Passages (multidoc_qa); may be repeated. Default: 20.")]
Subtasks = Annotated[Optional[list[str]], typer.Option(help="Part of the tasks to run, or TASK:PART; may be repeated. "
                                                            "Default: all.")]
Limit = Annotated[Optional[int], typer.Option(help="Most questions of each part.")]
Positions = Annotated[int, typer.Option(help="Places of the right passage (multidoc_qa).")]
Shots = Annotated[int, typer.Option(help="Examples before a question (mmlu).")]
Seed = Annotated[int, typer.Option(help="Of everything drawn.")]
NewTokens = Annotated[Optional[int], typer.Option(help="Replaces the task's own limits of an answer.")]
Sinks = Annotated[Optional[int], typer.Option(help="First tokens that streaming_llm and lm_infinite keep.")]
Patterns = Annotated[Optional[str], typer.Option(help="File with minference's patterns of this model.")]
NumGroups = Annotated[Optional[int], typer.Option(help="Constant number of core tokens; replaces --group-size.")]
ChunkSize = Annotated[Optional[int], typer.Option(help="Tokens of a prompt read at once; bounds the memory.")]
Results = Annotated[Optional[str], typer.Option(help="Append each item to this file as soon as it is done; items it "
                                                     "holds already are not run again.")]


def evaluate(model: Model, task: Tasks, data: Data,
             method: Annotated[str, typer.Option(help="cca, full, window, streaming_llm, lm_infinite, minference, mean "
                                                      "or max.")] = "cca",
             length: Lengths = None, documents: Documents = None, subtask: Subtasks = None, limit: Limit = None,
             positions: Positions = 5, shots: Shots = 5, seed: Seed = 42, max_new_tokens: NewTokens = None,
             group_size: GroupSize = None, window_size: WindowSize = None, sinks: Sinks = None,
             patterns: Patterns = None, num_groups: NumGroups = None, chunk_size: ChunkSize = None,
             dtype: Dtype = "auto", device: Device = "auto", results: Results = None, json: Json = None) -> None:
    """Evaluate a model from files: perplexity, multi-document QA, RULER, MMLU, LongBench-E."""
    _evaluate(model, [method], task, data, (length, documents, subtask, limit, positions, shots, seed, max_new_tokens),
              {"group_size": group_size, "window_size": window_size, "sinks": sinks, "patterns": patterns},
              {"num_groups": num_groups, "chunk_size": chunk_size, "dtype": dtype, "device": device}, results, json)


def compare(model: Model, task: Tasks, data: Data,
            method: Annotated[list[str], typer.Option(help="As for eval; may be repeated.")] = ["full", "cca"],
            length: Lengths = None, documents: Documents = None, subtask: Subtasks = None, limit: Limit = None,
            positions: Positions = 5, shots: Shots = 5, seed: Seed = 42, max_new_tokens: NewTokens = None,
            group_size: GroupSize = None, window_size: WindowSize = None, sinks: Sinks = None,
            patterns: Patterns = None, num_groups: NumGroups = None, chunk_size: ChunkSize = None,
            dtype: Dtype = "auto", device: Device = "auto", results: Results = None, json: Json = None,
            plot: Plot = None, force: Force = False) -> None:
    """Several methods on several tasks and lengths: one table and one figure."""
    from corecontext.text import check_output

    check_output(plot, force)
    if plot is not None:
        from corecontext.bench.figures import check_plot
        check_plot(plot)
    rows = _evaluate(model, method, task, data,
                     (length, documents, subtask, limit, positions, shots, seed, max_new_tokens),
                     {"group_size": group_size, "window_size": window_size, "sinks": sinks, "patterns": patterns},
                     {"num_groups": num_groups, "chunk_size": chunk_size, "dtype": dtype, "device": device},
                     results, json)
    if plot is not None:
        from corecontext.eval.summary import draw
        draw(rows, plot)


def _evaluate(model: str, methods: list[str], tasks: list[str], data: list[str], settings: tuple[Any, ...],
              sizes: dict[str, Any], options: dict[str, Any], results: str | None, json: str | None) -> list[Any]:
    """What `eval` and `compare` share; returns the table's rows."""
    from corecontext.text import check_output

    chunk_size = options["chunk_size"]
    if chunk_size is not None and chunk_size < 1:
        raise UserError(f"chunk-size must be at least 1, got {chunk_size}.")
    for path in (results, json):
        check_output(path, force=True)  # appended to
    from corecontext.eval.evaluate import evaluate as run
    from corecontext.eval.items import Settings
    from corecontext.eval.summary import print_table, summarise, to_records

    length, documents, subtask, *others = settings
    chosen = Settings(tuple(length or ()), tuple(documents or (20,)), tuple(subtask or ()), *others)
    records = run(model, methods, tasks, data, chosen, sizes=sizes, results=results, **options)
    rows = summarise(records)
    if json is not None:
        from corecontext.record import append_records
        append_records(json, to_records(rows, records[0].device))
    print_table(rows, parts=len(methods) == 1 or len(rows) <= 60)
    return rows


def info(model: Model, group_size: GroupSize = None, window_size: WindowSize = None,
         length: Annotated[Optional[list[int]], typer.Option(help="Prompt length; may be repeated.")] = None) -> None:
    """What CCA would cost and save for a model, by length; loads no weights."""
    for value in length or ():
        if value < 1:
            raise UserError(f"length must be at least 1, got {value}.")
    from corecontext.bench.info import print_info

    print_info(model, group_size, window_size, length)


def bench_operator(length: Annotated[Optional[list[int]], typer.Option(
                       help="Sequence length; may be repeated. Default: 32768; on a GPU 1024, 2048, ... 131072.")
                   ] = None,
                   heads: Annotated[Optional[int], typer.Option(help="Query heads. Default: 8; on a GPU 32.")] = None,
                   kv_heads: Annotated[Optional[list[int]], typer.Option(
                       help="Key and value heads; may be repeated. Default: 2; on a GPU 32 and 8.")] = None,
                   head_dim: Annotated[Optional[int], typer.Option(
                       help="Size of a head. Default: 64; on a GPU 128.")] = None,
                   batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
                   dtype: Annotated[Optional[str], typer.Option(
                       help="float32, bfloat16 or float16. Default: float32; on a GPU bfloat16.")] = None,
                   device: Device = "auto",
                   group_size: Annotated[int, typer.Option(help="Tokens per core token, g.")] = 16,
                   window_size: Annotated[int, typer.Option(help="Nearest tokens kept as they are, s.")] = 1024,
                   forward_only: Annotated[bool, typer.Option("--forward-only", help="No backward pass.")] = False,
                   memory_length: Annotated[Optional[list[int]], typer.Option(
                       help="Length at which peak memory is measured; may be repeated. Default: L/4, L/2, L.")] = None,
                   repeats: Annotated[int, typer.Option(help="Timed calls; on a GPU, timed queues of calls.")] = 5,
                   method: Annotated[Optional[list[str]], typer.Option(
                       help="full, sdpa_flash, sdpa_cudnn, flash_attn_4, flex or cca; may be repeated. Default: full "
                            "and cca; on a GPU all but full.")] = None,
                   baseline_limit_s: Annotated[float, typer.Option(
                       help="Leave full attention out where a call would take longer than this.")] = 30.0,
                   flex_length: Annotated[Optional[list[int]], typer.Option(
                       help="Length at which FlexAttention is measured; may be repeated. Default: 8192 and 32768.")
                   ] = None,
                   decode_batch: Annotated[Optional[list[int]], typer.Option(
                       help="Sequences decoded at once; may be repeated. Default: none; on a GPU 1, 8 and 64.")] = None,
                   decode_length: Annotated[Optional[list[int]], typer.Option(
                       help="Context length of decoding; may be repeated. Default: every length; on a GPU 8192, 32768 "
                            "and 131072.")] = None,
                   json: Json = None, plot: Plot = None, force: Force = False) -> None:
    """CCA against full causal attention on this machine: time, peak memory, decoding, and the floor."""
    from corecontext.text import check_output

    check_output(plot, force)
    check_output(json, force=True)  # appended to
    if plot is not None:
        from corecontext.bench.figures import check_plot
        check_plot(plot)
    from corecontext.bench.operator import run_operator_bench
    from corecontext.bench.settings import defaults
    from corecontext.bench.tables import print_table
    from corecontext.loading import one_line, pick_device

    given = {"lengths": length, "query_heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype,
             "memory_lengths": memory_length, "methods": method, "flex_lengths": flex_length,
             "decode_batches": decode_batch, "decode_lengths": decode_length,
             "passes": ["forward"] if forward_only else None}
    with one_line():
        bench = defaults(pick_device(device), batch=batch, group_size=group_size, window_size=window_size,
                         repeats=repeats, baseline_limit_s=baseline_limit_s,
                         **{name: value for name, value in given.items() if value is not None and value != []})
    from corecontext.record import append_records

    # What is measured is kept at once: a long run that is cut short has not been for nothing.
    records = run_operator_bench(bench, lambda new: append_records(json, new) if json is not None else None)
    if plot is not None:
        from corecontext.bench.figures import draw_operator
        draw_operator(records, plot)
    print_table(records)


def bench_serve(mode: Annotated[str, typer.Option(help="day: a day-shaped curve; rising: rate after rate until the "
                                                       "median wait for the first token passes the limit.")] = "day",
                variant: Annotated[list[str], typer.Option(help="elastic, fixed, cca:G:S or full; may be repeated.")
                                   ] = ["elastic", "fixed"],
                model: Annotated[Optional[str], typer.Option(help="As for serve.")] = None,
                shape: Annotated[Optional[str], typer.Option(help="llama3.1-8b: a model of these sizes with random "
                                                                  "weights.")] = None,
                prompt_length: Annotated[int, typer.Option(help="Tokens of each prompt; all are distinct.")] = 1024,
                shared_length: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
                new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
                seconds: Annotated[float, typer.Option(help="Of the day, or of each rate.")] = 240.0,
                base_rate: Annotated[float, typer.Option(help="Requests a second at night, or at first.")] = 0.2,
                peak_rate: Annotated[float, typer.Option(help="Requests a second at the peak, or at last.")] = 2.0,
                growth: Annotated[float, typer.Option(help="Of a rising load, from rate to rate.")] = 1.25,
                first_token_limit: Annotated[float, typer.Option(help="Seconds at which a rising load ends.")] = 2.0,
                seed: Seed = 0, group_size: GroupSize = None, window_size: WindowSize = None,
                cache_mib: Annotated[Optional[int], typer.Option(help="As for serve.")] = None,
                max_running: Annotated[int, typer.Option(help="As for serve.")] = 64,
                rows_per_pool: Annotated[Optional[int], typer.Option(help="As for serve.")] = None,
                chunk_size: Annotated[Optional[int], typer.Option(help="As for serve.")] = None,
                dtype: Dtype = "auto", device: Device = "auto", json: Json = None, plot: Plot = None,
                force: Force = False) -> None:
    """Latency, throughput and chosen g and s of a server under load; needs the extra 'serve' and httpx."""
    from corecontext.text import check_output

    check_output(plot, force)
    check_output(json, force=True)  # appended to
    if plot is not None:
        from corecontext.bench.figures import check_plot
        check_plot(plot)
    from corecontext.bench.serve import ServeBench, print_table, run_serve_bench
    from corecontext.loading import one_line
    from corecontext.record import append_records

    with one_line():
        bench = ServeBench(mode, tuple(variant), model, shape, prompt_length, shared_length, new_tokens, seconds,
                           base_rate, peak_rate, growth, first_token_limit, seed, group_size, window_size, cache_mib,
                           max_running, rows_per_pool, chunk_size, dtype, device)
    records = run_serve_bench(bench, lambda new: append_records(json, new) if json is not None else None)
    if plot is not None:
        from corecontext.bench.serve_figure import draw_serve
        draw_serve(records, plot)
    print_table(records)


def serve(model: Annotated[Optional[str], typer.Option(help="Folder in the Hugging Face format, or an identifier "
                                                            "on the hub. Default: the bundled model.")] = None,
          name: Annotated[Optional[str], typer.Option(help="What clients call the model. Default: the last part of "
                                                           "--model.")] = None,
          method: Annotated[str, typer.Option(help="cca, or full for full attention from a static cache.")] = "cca",
          group_size: GroupSize = None, window_size: WindowSize = None,
          policy: Annotated[str, typer.Option(help="g and s of requests that choose none: elastic (by the load), "
                                                   "fixed (the model's), or module:function.")] = "elastic",
          first_token_limit: Annotated[float, typer.Option(help="Seconds to the first token at which elastic "
                                                                "compresses most.")] = 2.5,
          host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")
                          ] = "127.0.0.1",
          port: Annotated[int, typer.Option(help="0 takes a free one, which the first log line names.")] = 8000,
          api_key_file: Annotated[Optional[str], typer.Option(help="File with the key that clients must send. Default: "
                                                                   "the variable CORECONTEXT_API_KEY; none: no key.")
                                  ] = None,
          cache_mib: Annotated[Optional[int], typer.Option(help="Budget of all caches, MiB. Default: by the free "
                                                                "memory.")] = None,
          max_running: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
          rows_per_pool: Annotated[Optional[int], typer.Option(help="Slots of cache allocated at once. Default: 8; on "
                                                                    "a GPU 16.")] = None,
          queue_limit: Annotated[int, typer.Option(help="Requests that may wait; more get 429.")] = 256,
          chunk_size: Annotated[Optional[int], typer.Option(help="Tokens of a prompt read between two steps. Default: "
                                                                 "256; on a GPU 1024.")] = None,
          max_length: Annotated[Optional[int], typer.Option(help="Most tokens of prompt and answer. Default: the "
                                                                 "model's.")] = None,
          time_limit: Annotated[float, typer.Option(help="Seconds after which a request is ended.")] = 600.0,
          dtype: Dtype = "auto", device: Device = "auto",
          random_weights: Annotated[bool, typer.Option("--random-weights", help="Make weights up; --model needs only "
                                                                                "config.json. For benchmarks.")] = False
          ) -> None:
    """Serve a model to many users by the OpenAI protocol; needs the extra 'serve'."""
    from corecontext.serve.run import Serving, run
    from corecontext.text import read_text

    key = os.environ.get("CORECONTEXT_API_KEY") or None
    if api_key_file is not None:
        key = read_text(api_key_file).strip()
    run(Serving(model, name, method, group_size, window_size, policy, first_token_limit, host, port, key, cache_mib,
                max_running, rows_per_pool, queue_limit, chunk_size, max_length, time_limit, dtype, device,
                random_weights))


COMMANDS: dict[str, Callable[..., None]] = {"demo": demo, "generate": generate, "perplexity": perplexity, "info": info,
                                             "eval": evaluate, "compare": compare, "serve": serve}
BENCHES: dict[str, Callable[..., None]] = {"operator": bench_operator, "serve": bench_serve}


def _version(wanted: bool) -> None:
    if wanted:
        from corecontext import __version__
        print(f"corecontext {__version__}")
        raise typer.Exit()


def _top(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                               help="Print the version.")] = False) -> None:
    """Core Context Aware attention for long-context language models."""


def build() -> typer.Typer:
    """The application made from the table above."""
    options: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}
    app, bench = typer.Typer(**options), typer.Typer(help="Measure on this machine.", **options)
    app.callback()(_top)
    bench.callback()(lambda: None)
    for name, command in COMMANDS.items():
        app.command(name)(command)
    for name, command in BENCHES.items():
        bench.command(name)(command)
    app.add_typer(bench, name="bench")
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or 2 after printing one line that says what to put right."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command = typer.main.get_command(build())
        code = command.main(args=arguments or ["--help"], prog_name="corecontext", standalone_mode=False)
        if code == 130:  # typer makes an exit of Ctrl-C itself
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # what the command line's parser refuses
            return _fail(error.format_message())
        from corecontext.loading import is_out_of_memory
        if is_out_of_memory(error):
            return _fail("out of memory. Use a shorter text or length, --dtype bfloat16, a larger --group-size or a "
                         "smaller --window-size.")
        raise


def _fail(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
