"""Read data files, compressed or not, and name the file and line of every error."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from corecontext.files import UserError


def _open_zst(path: str | Path, mode: str, encoding: str) -> Any:
    """Open a Zstandard file for reading as `gzip.open` does; Python itself can from 3.14 on."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"file '{path}' needs the package pyarrow to be read. Install it with: pip install "
            "pyarrow"
        ) from None
    # zstandard's own reader takes a truncated file for a short one.
    stream = pyarrow.input_stream(io.FileIO(path), compression="zstd")
    return io.TextIOWrapper(io.BufferedReader(stream), encoding=encoding)


OPENERS: dict[str, Any] = {
    "": open,
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _open_zst,
}
"""Functions that open a file, by the ending of its compression."""
KINDS = {
    "text": (".txt", ".md", ".text"),
    "lines": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
}
"""Endings of each kind of file, without that of a compression; "lines" has a JSON object a line."""
_DAMAGED = (ValueError, OSError, EOFError, lzma.LZMAError, zlib.error)
"""Errors of decompressing and parsing."""


def find_file(
    folder: str | Path, names: Sequence[str], endings: Sequence[str] = (".jsonl", ".json")
) -> Path:
    """Return the first file in a folder with one of these names and endings, compressed or not.

    Raises:
        UserError: the folder or the file is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"data '{folder}' must be a folder with the task's files, got none.")
    for name in names:
        for ending in endings:
            for compression in OPENERS:
                path = folder / f"{name}{ending}{compression}"
                if path.is_file():
                    return path
    wanted = " or ".join(name + endings[0] for name in names)
    raise UserError(f"data '{folder}' must hold {wanted} (or .xz, .gz), got a folder without it.")


def kind_of(path: Path) -> str:
    """Return "text", "lines" or "parquet" by a file's ending; "" for other endings."""
    return next((kind for kind, endings in KINDS.items() if ending_of(path) in endings), "")


def ending_of(path: Path) -> str:
    """Return a file's ending in lower case, without that of its compression."""
    if path.suffix.lower() in OPENERS:
        path = path.with_suffix("")
    return path.suffix.lower()


def open_text(path: str | Path) -> Any:
    """Open a UTF-8 text file for reading, with or without a byte order mark; decompress it by its
    ending.

    Raises:
        UserError: the file cannot be read.
    """
    path = Path(path)
    try:
        return OPENERS.get(path.suffix.lower(), open)(path, "rt", encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"file '{path}' cannot be read: {error.strerror or error}.") from None


def read_text_file(path: Path) -> str:
    """Return the whole text of a file.

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    with open_text(path) as file:
        try:
            return file.read()
        except _DAMAGED as error:
            raise UserError(f"file '{path}' must be UTF-8 text: {error}") from None


def read_lines(path: str | Path, needs: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file.

    Args:
        needs: Keys that each object must have.

    Raises:
        UserError: a line holds no such object; the message names the line.
    """
    for _, value in numbered_lines(path, needs):
        yield value


def numbered_lines(
    path: str | Path, needs: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) as `read_lines` yields objects."""
    number = 0
    try:
        with open_text(path) as lines:
            # Lines are decoded singly, so that the error can name the line that is not UTF-8.
            for line in lines.buffer:
                number += 1
                if line.strip():
                    value = json.loads(line.decode("utf-8-sig"))
                    _check_keys(value, needs)
                    yield number, value
    except UnicodeDecodeError as error:
        raise UserError(
            f"file '{path}', line {number}: must be UTF-8, got byte "
            f"0x{error.object[error.start]:02x}. Convert the file to UTF-8 first."
        ) from None
    except _DAMAGED as error:
        raise UserError(f"file '{path}', line {max(1, number)}: {error}") from None


def _check_keys(value: Any, needs: Sequence[str]) -> None:
    """Raise a ValueError unless `value` is an object with these keys."""
    wanted = f"an object with {', '.join(needs)}" if needs else "an object"
    if not isinstance(value, dict):
        raise ValueError(f"must be {wanted}, got a {type(value).__name__}.")
    if not all(key in value for key in needs):
        raise ValueError(f"must be {wanted}, got one with {', '.join(value)}."[:300])


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        UserError: the file holds no JSON.
    """
    try:
        with open_text(path) as file:
            return json.load(file)
    except _DAMAGED as error:
        raise UserError(f"file '{path}' must hold JSON: {error}") from None


def read_documents(path: str | Path) -> Iterator[tuple[str, str, str]]:
    """Yield (name, domain, text) of each document: the fields "id", "domain" and "text" of each
    object in a JSON-lines file, or one plain text file.

    Raises:
        UserError: the file cannot be read, or a line has no text; the message names the line.
    """
    path = Path(path)
    if kind_of(path) != "lines":
        yield path.name, "", read_text_file(path)
        return
    for index, (line, row) in enumerate(numbered_lines(path, ("text",))):
        text = row["text"]
        if not isinstance(text, str):
            raise UserError(f"file '{path}', line {line}: text must be a string, got {text!r:.40}.")
        yield str(row.get("id", index)), str(row.get("domain", "")), text


def file_hash(path: str | Path) -> str:
    """Return the first 16 digits of a file's SHA-256."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def model_hash(name: str) -> str:
    """Return 16 digits that tell checkpoints of one name apart; "" for a name on the hub.

    They are a hash of config.json and each file of weights: of its name, its size, its first 64 KiB
    and its last MiB.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    weights = (*folder.glob("*.safetensors"), *folder.glob("*.bin"))
    for path in sorted((*folder.glob("config.json"), *weights)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:16]
