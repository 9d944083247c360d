"""One measured value with its provenance, as a JSON line: what results/*.jsonl hold."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

UNITS = {
    "operator.forward_ms": "ms",
    "operator.backward_ms": "ms",
    "operator.forward_backward_ms": "ms",
    "operator.decode_us": "us",
    "operator.peak_bytes": "bytes",
    "operator.skipped": "count",
    "model.first_token_s": "s",
    "model.next_token_ms": "ms",
    "model.cache_bytes": "bytes",
    "model.peak_bytes": "bytes",
    "model.tokens_per_s": "tokens/s",
    "model.skipped": "count",
    "training.tokens_per_s": "tokens/s",
    "training.peak_bytes": "bytes",
    "training.received_bytes": "bytes",
    "training.skipped": "count",
    "quality.perplexity": "perplexity",
    "quality.gain_kept": "fraction",
    "quality.accuracy": "fraction",
    "quality.bits_per_byte": "bits/byte",
    "quality.score": "fraction",
    "serve.first_token_s": "s",
    "serve.next_token_ms": "ms",
    "serve.requests_per_s": "requests/s",
    "serve.tokens_per_s": "tokens/s",
    "serve.limit_rate": "requests/s",
    "serve.setting_share": "fraction",
    "serve.failed": "count",
    "demo.first_token_s": "s",
    "demo.next_token_ms": "ms",
    "demo.cache_bytes": "bytes",
    "demo.peak_bytes": "bytes",
    "demo.perplexity": "perplexity",
    "demo.retrieval_accuracy": "fraction",
}
"""Every name a record may have, and the unit it implies."""

PACKAGES = ("torch", "transformers", "triton", "flash-attn-4")


@dataclass(frozen=True)
class Record:
    """One value, what was measured, and where, when and by which code."""

    name: str
    value: float
    unit: str
    q20: float | None = None
    q80: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    dirty: bool | None = None
    command: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if self.name not in UNITS:
            near = get_close_matches(self.name, UNITS, 1)
            raise ValueError(
                f"name must be one of corecontext.record.UNITS, got {self.name!r}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        if self.unit != UNITS[self.name]:
            raise ValueError(
                f"unit must be {UNITS[self.name]!r} for {self.name}, got {self.unit!r}."
            )
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise TypeError(f"value must be a number, got {self.value!r}.")
        if not abs(self.value) < float("inf"):
            raise ValueError(f"value must be finite, got {self.value}.")

    def to_json(self) -> str:
        """The record as one line of JSON, keys in the order of the fields; no quantiles where there
        are none."""
        values = {
            k: v
            for k, v in dataclasses.asdict(self).items()
            if k not in ("q20", "q80") or v is not None
        }
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of `to_json`; unknown keys are errors."""
        values = json.loads(line)
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"unknown record key {sorted(unknown)[0]!r}.")
        return cls(**values)


def make_record(
    name: str,
    value: float | Sequence[float],
    params: Mapping[str, Any],
    *,
    device: str | None = None,
    command: str | None = None,
) -> Record:
    """A record of this process's code and machine.

    Args:
        name: A key of UNITS.
        value: One number, or the samples of which the median and the 20 and 80 % quantiles are
            recorded.
        params: What was measured: method, sizes, dtype (docs/benchmarks.md).
        device: What it ran on; default the CPU. See `device_name`.
        command: How to repeat it; default this process's command line.

    Raises:
        ValueError, TypeError: the name is unknown or the value no finite number.
    """
    q20 = q80 = None
    if isinstance(value, Sequence):
        value, q20, q80 = median_and_quantiles(value)
    commit, dirty = source_version()
    return Record(
        name,
        value,
        UNITS.get(name, ""),
        q20,
        q80,
        dict(params),
        device or device_name("cpu"),
        versions(),
        commit,
        dirty,
        command or command_line(),
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def median_and_quantiles(samples: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Median, 20 % and 80 % quantile; no quantiles of fewer than three samples."""
    if not samples:
        raise ValueError("samples must hold at least one value, got none.")
    if len(samples) < 3:
        return statistics.median(samples), None, None
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return statistics.median(samples), cuts[0], cuts[3]


def append_records(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Append records to a file, all of them or none; its folder is made where missing."""
    text = "".join(record.to_json() + "\n" for record in records)
    if not text:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(
            handle, text.encode()
        )  # one write to an append-only handle: parallel runs do not mix their lines
    finally:
        os.close(handle)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a file, oldest first; an error names the line."""
    return parse_records(Path(path).read_bytes(), path)


def parse_records(data: bytes, path: str | os.PathLike[str]) -> list[Record]:
    """The same of what the file holds, or a part of it."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must hold records, got a byte that is no UTF-8 text at {error.start}."
        ) from None
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                records.append(Record.from_json(line))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}:{number} must be a record, got {line[:60]!r}. {error}"
                ) from None
    return records


def latest(records: Iterable[Record], name: str, **params: Any) -> Record | None:
    """The newest record of this name whose params have these values, or None."""
    found = [
        r
        for r in records
        if r.name == name and all(r.params.get(k) == v for k, v in params.items())
    ]
    return max(enumerate(found), key=lambda item: (item[1].date, item[0]))[1] if found else None


def device_name(device: Any) -> str:
    """A device in words: the GPU's name, or the CPU's with the number of threads torch uses."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)[1]  # type: ignore[index]
    except (OSError, TypeError):
        pass  # not Linux, or a CPU without a model name
    return f"{name}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Versions of what computes the value; packages not installed are left out."""
    from corecontext import __version__

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {**found, "corecontext": __version__}


def source_version() -> tuple[str | None, bool | None]:
    """The git commit of this code, and whether files other than results/ differ from it.

    The commit is what the environment variable CORECONTEXT_COMMIT says, for a copy without its
    history or with that of another commit; else what git says, or None where the code is installed.
    """
    root = Path(__file__).resolve().parent.parent
    told = os.environ.get("CORECONTEXT_COMMIT") or None
    if (
        told or not (root / "pyproject.toml").exists()
    ):  # installed: a repository around it would not be this one
        return told, None
    try:
        git = ["git", "-C", str(root)]
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return told, None
    return commit.stdout.strip(), bool(status.stdout.strip())


def command_line() -> str:
    """How this process was started, without the machine's own paths."""
    program, *rest = sys.argv or [""]
    name = Path(program).name
    if name.endswith(".py") and "corecontext" in Path(program).parts:
        parts = Path(program).with_suffix("").parts
        module = ".".join(parts[len(parts) - 1 - parts[::-1].index("corecontext") :]).removesuffix(
            ".__main__"
        )
        return shlex.join(["python", "-m", module, *rest])
    return shlex.join([name, *rest])


def newest(records: Iterable[Record], name: str, **params: Any) -> Record:
    """The last record of this name and these params.

    Raises:
        ValueError: there is none.
    """
    for r in reversed(list(records)):
        if r.name == name and all(r.params.get(key) == value for key, value in params.items()):
            return r
    raise ValueError(f"records must hold {name} with {params}, got none.")
