"""Reading the data files that the user gives, compressed or not."""

from __future__ import annotations

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


class _Unpacked(io.RawIOBase):
    """What a Zstandard file holds, frame after frame; to zstandard's own reader a file that was cut
    is a short one."""

    def __init__(self, file: Any, new_frame: Any) -> None:
        self._file, self._new_frame, self._left = file, new_frame, memoryview(b"")
        self._frame: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            ended = self._frame is None or self._frame.eof
            packed = (self._frame.unused_data if self._frame and ended else b"") or self._file.read(
                1 << 16
            )
            if not packed and not ended:
                raise EOFError("Compressed file ended before the end of a frame")
            if not packed:
                return 0
            if ended:
                self._frame = self._new_frame()
            self._left = memoryview(self._frame.decompress(packed))
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_zst(path: str | Path, mode: str, encoding: str) -> Any:
    """As gzip.open for reading, for Zstandard, which Python has from 3.14 on."""
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"file '{path}' needs the package zstandard to be read. Install corecontext[train]."
        ) from None
    unpacked = _Unpacked(open(path, "rb"), lambda: zstandard.ZstdDecompressor().decompressobj())
    return io.TextIOWrapper(io.BufferedReader(unpacked), encoding=encoding)


OPENERS: dict[str, Any] = {
    "": open,
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _open_zst,
}
_BROKEN = (
    ValueError,
    OSError,
    EOFError,
    lzma.LZMAError,
    zlib.error,
)  # what unpacking and parsing raise


def find_file(
    folder: str | Path, names: Sequence[str], endings: Sequence[str] = (".jsonl", ".json")
) -> Path:
    """The first file of one of these names (without ending) in a folder, compressed or not.

    Raises:
        UserError: the folder or the file is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"data '{folder}' must be a folder with the task's files, got none.")
    for name in names:
        for ending in endings:
            for packed in OPENERS:
                if (path := folder / f"{name}{ending}{packed}").is_file():
                    return path
    wanted = " or ".join(name + endings[0] for name in names)
    raise UserError(f"data '{folder}' must hold {wanted} (or .xz, .gz), got a folder without it.")


def open_text(path: str | Path) -> Any:
    """A text file opened for reading, unpacked by its ending.

    Raises:
        UserError: it cannot be read.
    """
    path = Path(path)
    try:
        return OPENERS.get(path.suffix, open)(
            path, "rt", encoding="utf-8-sig"
        )  # also with a byte order mark
    except OSError as error:
        raise UserError(f"file '{path}' cannot be read: {error.strerror or error}.") from None


def read_lines(path: str | Path, needs: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file.

    Args:
        needs: Keys that each must have.

    Raises:
        UserError: a line is no such object; says which.
    """
    for _, value in numbered_lines(path, needs):
        yield value


def numbered_lines(
    path: str | Path, needs: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """As `read_lines`, each with its line number, from 1."""
    number = 0
    try:
        with open_text(path) as lines:
            for line in (
                lines.buffer
            ):  # bytes: decoded by the line, so that the line that is no UTF-8 can be named
                number += 1
                if not line.strip():
                    continue
                value = json.loads(line.decode("utf-8-sig"))
                if not isinstance(value, dict) or not all(key in value for key in needs):
                    has = (
                        f" with {', '.join(value)}"
                        if isinstance(value, dict)
                        else f" but a {type(value).__name__}"
                    )
                    raise ValueError(
                        f"must be an object with {', '.join(needs)}, got one{has}"[:300]
                    )
                yield number, value
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(
            f"file '{path}', line {number}: must be UTF-8, got byte 0x{error.object[error.start]:02x}. "
            "Convert the file to UTF-8 first."
        ) from None
    except Exception as error:
        if not is_broken(error):
            raise
        raise UserError(f"file '{path}', line {max(1, number)}: {error}") from None


def is_broken(error: Exception) -> bool:
    """True for what unpacking and parsing a damaged file raise."""
    return isinstance(error, _BROKEN) or type(error).__name__ == "ZstdError"


def read_json(path: str | Path) -> Any:
    """The value in a JSON file.

    Raises:
        UserError: it holds none.
    """
    try:
        with open_text(path) as file:
            return json.load(file)
    except _BROKEN as error:
        raise UserError(f"file '{path}' must hold JSON: {error}") from None


def read_documents(path: str | Path) -> Iterator[tuple[str, str, str]]:
    """Name, domain and text of each document: objects with "text" in a JSON-lines file, or one
    plain text file.

    Raises:
        UserError: the file cannot be read, or holds no text; says which line.
    """
    path = Path(path)
    if ".jsonl" not in path.suffixes:
        try:
            with open_text(path) as file:
                text = file.read()
        except Exception as error:
            if not is_broken(error):
                raise
            raise UserError(f"file '{path}' must be UTF-8 text: {error}") from None
        yield path.name, "", text
        return
    for number, (line, one) in enumerate(numbered_lines(path, ("text",))):
        if not isinstance(one["text"], str):
            raise UserError(
                f"file '{path}', line {line}: text must be a string, got {one['text']!r:.40}."
            )
        yield str(one.get("id", number)), str(one.get("domain", "")), one["text"]


def file_hash(path: str | Path) -> str:
    """First 16 digits of a file's SHA-256."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()[:16]


def model_hash(name: str) -> str:
    """Tells checkpoints of one name apart: config.json, and size, beginning and end of each file of
    weights.

    A name on the hub has none: "".
    """
    folder, digest = Path(name).expanduser(), hashlib.sha256()
    if not folder.is_dir():
        return ""
    for path in sorted(
        (*folder.glob("config.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin"))
    ):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:16]
