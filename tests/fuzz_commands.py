"""Run every command on a checkpoint whose `cca` settings are drawn from odd and hostile values:
each works, or says why not in one short line.

    python tests/fuzz_commands.py --count 300 --first 0
"""

import argparse
import contextlib
import functools
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import uvicorn
from tiny_model import save_tiny_model
from transformers import AutoModelForCausalLM

from corecontext import enable
from corecontext.cli import main
from corecontext.demo import compare
from corecontext.files import first_line

LARGE = 2**31 - 1
SIZES = (0, 1, 2, 3, 5, 8, 64, 1000, LARGE)
ODD = (-1, LARGE + 1, 10**30, 1.5, 4.0, True, None, "4", "", [], [4], {}, "x" * 10**6, "\x00\n")
LEGAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("group_size", "window_size", "sink_size"), SIZES),
    **dict.fromkeys(("fetch_groups", "fetch_share", "fetch_slots"), SIZES),
    "num_groups": (None, *SIZES),
    "core_position": ("middle", "token"),
    "core_bias": (0.0, 2.5, float("nan")),
    "layer_group_sizes": ([4], [4, 8], [[4, 8], 2], [[1, 4], [1, 1]], [[3]], [LARGE, 2], [[], 1]),
    "head_group_sizes": ([4], [4, 8], [1, 9], [1, 1], [2, 3, 4], [LARGE, 1], [[4], 4]),
    "cache_dtype": ("auto", "int8", "fp8"),
    "backend": ("auto", "packed", "reference", "triton"),
    "core_mass": (True, False),
    "fetch_index": ("mean", "oracle", "parts:2:2", "parts:99999:4", "pairs:1", "bits:4", "bits:3"),
    "store": ("none", "device", "host"),
    "prefill": ("auto", "fetch", "full", "cca"),
    "learned": ([], ["bias"]),
    "windowsize": (8,),
}
WHOLE = ([], {}, "text", 5, None, True, [{"group_size": 4}])
"""Values of `cca` that are no dict of settings."""
LONGEST = 600
"""Characters of an error's line."""
SLOWEST_S = 100.0


def draw_settings(number: int) -> Any:
    """Draw small sizes, and one to four other values."""
    draw = random.Random(f"cca {number}")
    if draw.random() < 0.03:
        return draw.choice(WHOLE)
    settings: dict[str, Any] = {"group_size": 4, "window_size": 8}
    if draw.random() < 0.6:
        settings |= {"fetch_groups": 2, "fetch_index": "pairs:2"}
    for name in draw.sample(sorted(LEGAL), draw.randint(1, 4)):
        is_odd = draw.random() < 0.15
        settings[name] = draw.choice(ODD if is_odd else LEGAL[name])
    return settings


def commands(folder: Path) -> dict[str, Callable[[], int]]:
    """Return a call of every command, by its name."""
    model, text, new = str(folder / "model"), str(folder / "text.txt"), str(folder / "new")
    lines = {
        "generate": ["--prompt-file", text, "--max-new-tokens", "3"],
        "serve": ["--port", "0", "--cache-mib", "64", "--host-cache-mib", "64"],
        "perplexity": [text],
        "eval": ["--task", "perplexity", "--data", text, "--length", "100"],
        "compare": ["--task", "perplexity", "--data", text, "--length", "100"],
        "inspect": [text, "--output", f"{new}.html", "--force", "--max-tokens", "60"],
        "info": ["--length", "100"],
        "demo": ["--questions", "1", "--max-tokens", "400", "--document", text],
        "train": ["--data", text, "--output", new, "--steps", "1", "--context-length", "64"],
    }
    lines["train"] += ["--batch-size", "1", "--cache-dir", f"{new}.cache"]
    calls: dict[str, Callable[[], int]] = {
        name: functools.partial(main, [name, "--model", model, *line])
        for name, line in lines.items()
    }
    calls["convert"] = functools.partial(main, ["convert", model, new])
    return calls | {"enable": functools.partial(enable_by_hand, model)}


def enable_by_hand(model: str) -> int:
    """Enable a model in Python; a refusal is an error of one line."""
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model)
        enable(loaded, warn=False)
        loaded.generate(torch.arange(2, 42)[None], max_new_tokens=3, do_sample=False)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError) as error:
        # Sizes beyond the model are cut by commands only: in Python a cache allocates them.
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 2
    return 0


def outcome(call: Callable[[], int]) -> tuple[str, str]:
    """Return "works", "refused" or what is wrong, and the error's line."""
    began = time.monotonic()
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = call()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
        return "TRACEBACK", f"{type(error).__name__}: {str(error)[:200]} {places}"
    lines = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    line = lines[-1] if lines else ""
    if time.monotonic() - began > SLOWEST_S:
        return "SLOW", line
    if (code, len(lines)) not in ((0, 0), (2, 1)) or "out of memory" in line:
        return "ODD", f"code {code}: {str(lines)[:200]}, {err.getvalue()[-200:]}"
    if len(line) > LONGEST or line == "error: ":
        return "ODD", line[:LONGEST]
    return ("works" if code == 0 else "refused"), line


def run(first: int, count: int, folder: Path) -> Counter[str]:
    """Run the commands on each `cca`; print what is wrong, and each refusal once."""
    save_tiny_model(folder / "model", max_length=1024)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    config = json.loads((folder / "model/config.json").read_text())
    outcomes: Counter[str] = Counter()
    shown = set()
    for number in range(first, first + count):
        settings = draw_settings(number)
        for name, call in commands(folder).items():
            (folder / "model/config.json").write_text(json.dumps(config | {"cca": settings}))
            kind, line = outcome(call)
            outcomes[kind] += 1
            if kind not in ("works", "refused") or line not in shown:
                print(number, name, kind, str(settings)[:300], line[:LONGEST], flush=True)
            shown.add(line)
            for path in folder.glob("new*"):
                shutil.rmtree(path, ignore_errors=True)
    return outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=300)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(uvicorn.Server, "run", lambda *given: None),
        mock.patch.object(compare, "_measure_apart", compare._measure_here),
    ):
        outcomes = run(options.first, options.count, Path(name))
    print(dict(outcomes))
