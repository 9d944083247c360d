"""Record measured values with their provenance, as the JSON lines of results/*.jsonl."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from io import FileIO
from pathlib import Path
from typing import Any

from corecontext.config import did_you_mean

UNITS = {
    "operator.forward_ms": "ms",
    "operator.backward_ms": "ms",
    "operator.forward_backward_ms": "ms",
    "operator.decode_us": "us",
    "operator.peak_bytes": "bytes",
    "operator.skipped": "count",
    "user.first_token_s": "s",
    "user.next_token_ms": "ms",
    "user.device_bytes": "bytes",
    "user.host_bytes": "bytes",
    "model.first_token_s": "s",
    "model.next_token_ms": "ms",
    "model.cache_bytes": "bytes",
    "model.host_bytes": "bytes",
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
    "real.perplexity": "perplexity",
    "real.gain_kept": "fraction",
    "real.next_perplexity": "perplexity",
    "real.next_gain_kept": "fraction",
    "real.accuracy": "fraction",
    "real.answer_nll": "nats",
    "real.first_token_s": "s",
    "real.hit_share": "fraction",
    "real.recall": "fraction",
    "real.training_s": "s",
    "real.training_bytes": "bytes",
    "choices.gain_kept": "fraction",
    "choices.accuracy": "fraction",
    "serve.first_token_s": "s",
    "serve.next_token_ms": "ms",
    "serve.requests_per_s": "requests/s",
    "serve.tokens_per_s": "tokens/s",
    "serve.limit_rate": "requests/s",
    "serve.setting_share": "fraction",
    "serve.failed": "count",
    "vllm.first_token_s": "s",
    "vllm.next_token_ms": "ms",
    "vllm.requests_per_s": "requests/s",
    "vllm.cache_tokens": "tokens",
    "vllm.accuracy": "fraction",
    "checks.failed": "count",
    "demo.first_token_s": "s",
    "demo.next_token_ms": "ms",
    "demo.cache_bytes": "bytes",
    "demo.host_bytes": "bytes",
    "demo.peak_bytes": "bytes",
    "demo.perplexity": "perplexity",
    "demo.retrieval_accuracy": "fraction",
}
"""Every name that a record may have, and its unit."""

PACKAGES = ("torch", "transformers", "triton", "flash-attn-4", "kvpress", "vllm")
"""Packages whose versions a record names, where they are installed."""
TOP_FOLDERS = ("corecontext", "benchmarks", "reproduction")
"""Folders of programs that a record's command starts by `python -m`."""


@dataclass(frozen=True)
class Record:
    """Hold one measured value, and where, when and by which code it was measured."""

    name: str
    """A key of UNITS."""
    value: float
    """A measurement, or the median of several."""
    unit: str
    q20: float | None = None
    """The 20 % quantile of several measurements."""
    q80: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    """Settings of what was measured: method, sizes, dtype."""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    dirty: bool | None = None
    """Whether files differed from the commit. Both are None where unknown."""
    command: str = ""
    """Repeats the measurement."""
    date: str = ""
    """UTC, as ISO 8601."""

    def __post_init__(self) -> None:
        if self.name not in UNITS:
            hint = did_you_mean(self.name, UNITS)
            raise ValueError(
                f"name must be one of corecontext.record.UNITS, got {self.name!r}.{hint}"
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
        """Return one line of JSON, keys in the order of the fields, without quantiles that are
        None."""
        values = dataclasses.asdict(self)
        if self.q20 is None:
            del values["q20"], values["q80"]
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read the line of `to_json`; unknown keys are errors."""
        values = json.loads(line)
        for key in values:
            if key not in cls.__dataclass_fields__:
                raise ValueError(f"unknown record key {key!r}.")
        return cls(**values)


def make_record(
    name: str,
    value: float | Sequence[float],
    params: Mapping[str, Any],
    *,
    device: str | None = None,
    command: str | None = None,
) -> Record:
    """Make a record of this process's code and machine.

    Args:
        name: A key of UNITS.
        value: A finite number, or the samples of which the median and the 20 and 80 % quantiles
            are recorded.
        params: Method, sizes, dtype (docs/benchmarks.md).
        device: Name of the device, see `device_name`; None takes the CPU's.
        command: Command that repeats the measurement; None takes this process's command line.
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
    """Return median, 20 % and 80 % quantile; no quantiles of fewer than three samples."""
    if not samples:
        raise ValueError("samples must hold at least one value, got none.")
    if len(samples) < 3:
        return statistics.median(samples), None, None
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return statistics.median(samples), cuts[0], cuts[3]


def append_records(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Append records to a file, a line each, all of them or none; make its folder where it is
    missing.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    data = "".join(record.to_json() + "\n" for record in records).encode()
    if not data:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    try:
        # One write, unbuffered, to an append-only file: parallel runs do not mix their lines.
        with path.open("a+b", buffering=0) as file:
            if not _ends_with_line(file):
                data = b"\n" + data
            _append_all(file, data)
    except OSError as error:  # errors of writing do not name the file
        if is_new:
            path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _ends_with_line(file: FileIO) -> bool:
    """Whether a file is empty or ends with a line break: an interrupted write or an editor may have
    left none."""
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _append_all(file: FileIO, data: bytes) -> None:
    """Append bytes to a file, all of them or none: a disk that is nearly full takes a part of the
    bytes, and raises at the next write."""
    written = file.write(data)
    try:
        while written < len(data):
            written += file.write(data[written:])
    except OSError:
        # Remove the part, unless another process has appended lines behind it.
        if file.tell() == os.fstat(file.fileno()).st_size:
            file.truncate(file.tell() - written)
        raise


def read_records(path: str | os.PathLike[str], data: bytes | None = None) -> list[Record]:
    """Read the records of a file, or of `data`, its bytes, in their order; an error names the
    line."""
    if data is None:
        data = Path(path).read_bytes()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must hold records, got a byte that is no UTF-8 text at {error.start}."
        ) from None
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            records.append(Record.from_json(line))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path}:{number} must be a record, got {line[:60]!r}. {error}"
            ) from None
    return records


def latest(records: Iterable[Record], name: str, **params: Any) -> Record | None:
    """Return the record of this name and these params with the latest date, of several the last in
    order; None if there is none."""
    matching = [
        record
        for record in records
        if record.name == name
        and all(record.params.get(key) == value for key, value in params.items())
    ]
    return max(reversed(matching), key=lambda record: record.date, default=None)


def newest(records: Iterable[Record], name: str, **params: Any) -> Record:
    """Return the record that `latest` finds; raise ValueError if there is none."""
    record = latest(records, name, **params)
    if record is None:
        raise ValueError(f"records must hold {name} with {params}, got none.")
    return record


def device_name(device: Any) -> str:
    """Return the GPU's name, or the CPU's with the number of threads that torch uses."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with suppress(OSError):  # not Linux
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        name = match[1] if match else name
    return f"{name}, {torch.get_num_threads()} threads"


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that compute values."""
    from corecontext import __version__

    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            numbers[package] = metadata.version(package)
    return {**numbers, "corecontext": __version__}


def source_version() -> tuple[str | None, bool | None]:
    """Return the git commit of this code, and whether files other than results/ differ from it;
    both are None where the code is installed. The environment variable CORECONTEXT_COMMIT names the
    commit of a copy of the files without git's history."""
    commit = os.environ.get("CORECONTEXT_COMMIT")
    if commit:
        return commit, None
    root = Path(__file__).resolve().parent.parent
    if not (root / "pyproject.toml").exists():
        return None, None  # installed: a repository around it would not be this one
    return _git_version(root)


@functools.cache
def _git_version(root: Path) -> tuple[str | None, bool | None]:
    """Ask git, once in a process: its code does not change, and git takes longer than many a
    measurement."""

    def git(arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments.split()]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status --porcelain --untracked-files=no -- . :!results")
        return git("rev-parse HEAD"), bool(changes)
    except (OSError, subprocess.CalledProcessError):
        return None, None


def command_line() -> str:
    """Return the command that started this process, of absolute paths only the last part: other
    machines have other folders."""
    program, *arguments = sys.argv or [""]
    rest = [_without_folders(argument) for argument in arguments]
    path = Path(program)
    folders = path.with_suffix("").parts
    tops = [i for i, folder in enumerate(folders) if folder in TOP_FOLDERS]
    if path.suffix == ".py" and tops:
        module = ".".join(folders[tops[-1] :]).removesuffix(".__main__")
        return shlex.join(["python", "-m", module, *rest])
    return shlex.join([path.name, *rest])


def _without_folders(argument: str) -> str:
    """Return an argument, or the last part of an absolute path in it: PATH or --option=PATH."""
    option, equals, value = argument.rpartition("=")
    if not value.startswith(("/", "~")):
        return argument
    return f"{option}{equals}{Path(value).name}"
