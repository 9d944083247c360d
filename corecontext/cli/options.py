"""Options that several commands share.

typer reads these annotations at run time on Python 3.10 as well, hence Optional.
"""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str, typer.Option(help="Folder in the Hugging Face format, or an identifier on the hub.")
]
GroupSize = Annotated[
    int | None,
    typer.Option(help="Tokens per core token, g. Default: the checkpoint's, else 16."),
]
WindowSize = Annotated[
    int | None,
    typer.Option(help="Nearest tokens kept as they are, s. Default: the checkpoint's, else 1024."),
]
CacheDtype = Annotated[
    str | None,
    typer.Option(
        help="auto, or int8 or fp8 for a cache of 8-bit keys and values. "
        "Default: the checkpoint's, else auto."
    ),
]
Method = Annotated[str, typer.Option(help="cca, or full for the model's own attention.")]
Dtype = Annotated[str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")]
Json = Annotated[
    str | None,
    typer.Option("--json", help="Append the measured values to this file, one JSON line each."),
]
Plot = Annotated[
    str | None,
    typer.Option("--plot", help="Draw a figure (.png, .svg or .pdf); needs the extra 'plot'."),
]
DATA_HELP = "Folder with the task's files (docs/evaluation.md), or TASK=PATH; may be repeated."
Tasks = Annotated[
    list[str],
    typer.Option(help="perplexity, multidoc_qa, ruler, mmlu or longbench; may be repeated."),
]
Data = Annotated[list[str], typer.Option(help=DATA_HELP)]
Lengths = Annotated[
    list[int] | None,
    typer.Option(
        help="Tokens; may be repeated. Of a window (perplexity), of "
        "prompt and answer (ruler), of a prompt before its middle "
        "is cut (longbench)."
    ),
]
Documents = Annotated[
    list[int] | None, typer.Option(help="Passages (multidoc_qa); may be repeated. Default: 20.")
]
Subtasks = Annotated[
    list[str] | None,
    typer.Option(help="Part of the tasks to run, or TASK:PART; may be repeated. Default: all."),
]
Limit = Annotated[int | None, typer.Option(help="Most questions of each part.")]
Positions = Annotated[int, typer.Option(help="Places of the right passage (multidoc_qa).")]
Shots = Annotated[int, typer.Option(help="Examples before a question (mmlu).")]
Seed = Annotated[int, typer.Option(help="Of everything drawn.")]
NewTokens = Annotated[int | None, typer.Option(help="Replaces the task's own limits of an answer.")]
Sinks = Annotated[
    int | None,
    typer.Option(
        "--sinks",
        "--sink-size",
        help="First tokens that stay uncompressed, for "
        "cca (whole groups), streaming_llm and lm_infinite. Default: the "
        "checkpoint's, else 0; the rivals' own.",
    ),
]
Patterns = Annotated[
    str | None, typer.Option(help="File with minference's patterns of this model.")
]
NumGroups = Annotated[
    int | None, typer.Option(help="Constant number of core tokens; replaces --group-size.")
]
ChunkSize = Annotated[
    int | None, typer.Option(help="Tokens of a prompt read at once; bounds the memory.")
]
Results = Annotated[
    str | None,
    typer.Option(
        help="Append each item to this file as soon as it is done; items it "
        "holds already are not run again."
    ),
]
