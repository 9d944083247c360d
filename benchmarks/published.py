"""Run the commands of the published records of speed on one GPU, one after another.

Each command runs in a process of its own, and its records are appended when it has ended. A run
that is stopped is continued by the next one: commands with records at this commit are left out.
"""

import dataclasses
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from corecontext.record import append_records, read_records, source_version
from corecontext.terminal import console


class Published(NamedTuple):
    """A command of `python -m benchmarks`, and the file of results/ that has its records."""

    file: str
    command: str


_FETCH = "--method sdpa_cudnn --method cca --method fetch --method fetch_shared"
_MEAN = "--method fetch_mean --method fetch_mean_shared"
_STEPS = "--decode-length 32768 --decode-length 131072 --decode-batch 1 --decode-batch 8"
_HOST = "--method fetch_host --fetch-slots 256 --hit-share 0.976"
PUBLISHED = (
    Published(
        "fetch",
        "operator --kv-heads 8 --length 131072 --memory-length 131072 "
        "--method cca --method cca_sinks --pass forward --pass forward_backward",
    ),
    Published(
        "fetch",
        "operator --kv-heads 8 --kv-heads 32 --length 8192 --method sdpa_cudnn --method cca "
        f"--method fetch --pass forward {_STEPS}",
    ),
    Published(
        "fetch",
        "operator --kv-heads 8 --length 8192 --length 32768 --length 131072 --memory-length 131072 "
        f"{_FETCH} {_MEAN} --pass forward --pass forward_backward",
    ),
    Published(
        "fetch",
        f"operator --kv-heads 32 --length 131072 --memory-length 131072 {_FETCH} "
        "--pass forward --pass forward_backward",
    ),
    Published(
        "fetch",
        "model --shape llama3.1-8b --length 131072 --what ftl --method cca --method fetch "
        "--method fetch_host",
    ),
    Published(
        "fetch",
        "model --shape llama3.1-8b --length 131072 --what itl --method full_rows --method cca "
        "--method fetch --method fetch_host",
    ),
    Published("fetch", f"model --shape llama3.1-8b --length 131072 --what itl {_HOST}"),
    Published("fetch", f"model --shape llama3.1-8b --throughput {_HOST} --batch 64 --batch 112"),
    Published("fetch", "model --shape llama3.1-8b --throughput --method full_rows"),
    Published("vllm", "vllm"),
    Published("vllm", "vllm --prompt-length 1024 --new-tokens 256 --requests 192"),
    Published("vllm", "vllm --weights fp8 --length 1024 --length 32768 --requests 192 --compiled"),
    Published("operator", "operator"),
    Published(
        "operator",
        "operator --kv-heads 8 --length 8192 --length 32768 --length 131072 --memory-length 131072 "
        "--method sdpa_cudnn --method cca_default --pass forward --pass forward_backward",
    ),
    Published("operator", "operator --kv-heads 8 --length 131072 --length 1048576 --forward-only"),
    Published("model", "model --shape llama2-7b"),
    Published(
        "model", "model --shape llama2-7b --length 131072 --method cca --fuse none --fuse compile"
    ),
    Published(
        "model",
        "model --shape llama3.1-8b --length 1048576 --method cca --fuse compile --repeats 1",
    ),
    Published("model", "model --shape llama2-7b --sweep"),
    Published("model", "model --shape llama3.1-8b --throughput"),
    Published("training", "train --fuse"),
)


def pending(results: Path, words: str = "") -> list[Published]:
    """Return the commands with these words that have no record at this commit."""
    commit, dirty = source_version()
    made: set[tuple[str, str]] = set()
    for path in sorted(results.glob("*.jsonl")) if commit and not dirty else ():
        made |= {(path.stem, r.command) for r in read_records(path) if r.commit == commit}
    chosen = [row for row in PUBLISHED if words in row.command]
    return [row for row in chosen if (row.file, recorded_command(row)) not in made]


def recorded_command(row: Published) -> str:
    """Return the command as its records name it."""
    return f"python -m benchmarks {row.command} --json results/{row.file}.jsonl"


def measure(rows: Sequence[Published], results: Path, limit_s: float | None = None) -> list[str]:
    """Run the commands until the time is over; return the reasons of those that failed.

    Records of a command that failed or was stopped go to FILE.partial.jsonl.
    """
    end = float("inf") if limit_s is None else time.monotonic() + limit_s
    reasons = []
    for row in rows:
        left = end - time.monotonic()
        if left <= 0:
            break
        console().print(recorded_command(row), soft_wrap=True)
        reason = _run(row, results, None if limit_s is None else left)
        if reason:
            reasons.append(f"{row.command}: {reason}")
    return reasons


def _run(row: Published, results: Path, limit_s: float | None) -> str:
    """Run a command and append its records; return the reason where it did not end well."""
    reason = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        argv = [sys.executable, "-m", "benchmarks", *shlex.split(row.command), "--json", str(path)]
        try:
            code = subprocess.run(argv, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            reason = "stopped at the limit"
        else:
            reason = f"exit code {code}" if code else ""
        records = read_records(path) if path.exists() else []
    name = f"{row.file}.partial.jsonl" if reason else f"{row.file}.jsonl"
    command = recorded_command(row)
    append_records(results / name, [dataclasses.replace(r, command=command) for r in records])
    return reason
