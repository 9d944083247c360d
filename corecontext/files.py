"""Read and write the user's files, with one clear line for each mistake."""

import contextlib
import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

LIBRARIES = ("safetensors", "safetensors_rust", "tokenizers")
"""Libraries with exceptions of their own, which are refusals of what they are given."""
REFUSALS = (ValueError, TypeError, KeyError, OSError, ImportError, NotImplementedError)
"""Exceptions by which any library refuses."""


class UserError(Exception):
    """A mistake of the user: the command line prints it as one line and exits with code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of pyproject.toml; it names them
    one by one, since this package may be on no index."""
    packages = _packages(extra)
    if not packages:  # run from its source, without having been installed
        return f"pip install '.[{extra}]' in the folder of its source"
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def _packages(extra: str) -> list[str]:
    """Return the packages of an extra, those of the extras that it names included; none where this
    package is not installed."""
    try:
        requirements = importlib.metadata.requires("corecontext") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    packages = []
    for requirement in requirements:
        package, _, marker = requirement.partition(";")
        if f'extra == "{extra}"' not in marker:
            continue
        nested = re.fullmatch(r"corecontext\[(.*)\]", package)
        extras = nested[1].split(",") if nested else []
        packages += [name for inner in extras for name in _packages(inner)] or [package.strip()]
    return packages


def first_line(error: BaseException) -> str:
    """Return an exception's first line, joined with the next where it ends with a colon; its class
    where it has no text."""
    if isinstance(error, KeyError):
        return f"missing or unknown key {error}"
    lines = list(filter(None, map(str.strip, str(error).splitlines()))) or [type(error).__name__]
    end = next((i for i, line in enumerate(lines) if not line.endswith(":")), 0)
    return " ".join(lines[: end + 1])


@contextlib.contextmanager
def one_line(prefix: str = "") -> Iterator[None]:
    """Turn the refusals of a library into a UserError of one line; let bugs through.

    Args:
        prefix: Begins the line, as "model 'x' cannot be loaded". It is given where a checkpoint is
            read, so that a RuntimeError is a refusal too: of the checkpoint's content.
    """
    try:
        yield
    except Exception as error:
        from_library = type(error).__module__.split(".")[0] in LIBRARIES
        broken = bool(prefix) and isinstance(error, RuntimeError)
        refused = from_library or broken or isinstance(error, REFUSALS)
        if isinstance(error, UserError) or is_out_of_memory(error) or not refused:
            raise
        message = first_line(error)
        if prefix:
            message = f"{prefix}: {message}"
        raise UserError(message) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, a GPU, cuBLAS or PyTorch's CPU allocator ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    messages = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "std::bad_alloc")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in messages)


def read_text(path: str) -> str:
    """Read the text of a file, or of standard input for "-".

    Raises:
        UserError: the file is missing, not readable, empty, or not UTF-8 text.
    """
    name = "standard input" if path == "-" else f"file '{path}'"
    if path == "-" and sys.stdin is None:
        raise UserError(f"{name} must hold text, but it is closed.")
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{name} does not exist. Give an existing file, or - for standard input."
        ) from None
    except IsADirectoryError:
        raise UserError(f"{name} must be a file, got a folder.") from None
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from None
    if not data.strip():
        raise UserError(f"{name} must hold text, got an empty one.")
    try:
        # mutant loading: a byte order mark is a part of the text
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = error.start + len(data) - len(error.object)  # a byte order mark is not in `object`
        raise UserError(
            f"{name} must be UTF-8 text, got byte 0x{data[place]:02x} at {place}. "
            "Convert it to UTF-8 first."
        ) from None
    if "\0" in text:
        raise UserError(
            f"{name} must be UTF-8 text, got a binary file (a zero byte at {data.index(0)})."
        )
    # As Python reads text files, so that a file of Windows is one text for all commands.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_output(path: str | None, force: bool = False) -> None:
    """Raise, before any work is done, if `path` cannot be written or would be overwritten without
    `force`."""
    if path is None:
        return
    target = Path(path)
    if target.is_dir():
        raise UserError(f"output '{path}' must be a file, got a folder.")
    if target.exists() and not target.is_file():
        raise UserError(f"output '{path}' must be a file, got a device or a pipe.")
    if target.exists() and not force:
        raise UserError(f"output '{path}' already exists. Use --force to overwrite it.")
    if not target.parent.is_dir():
        raise UserError(
            f"output '{path}' must be in an existing folder. Make '{target.parent}' first."
        )
    if not os.access(target.parent, os.W_OK):
        raise UserError(f"output '{path}' cannot be written: no permission for '{target.parent}'.")


def cache_folder() -> Path:
    """Return the package's folder in the user's cache, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "corecontext"


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder unless it exists.

    Raises:
        UserError: a file is in its place, or there is no permission.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"'{path}' must be a folder, or a place for one: {error.strerror}. Give another."
        ) from None


@contextlib.contextmanager
def alone_in(folder: str | os.PathLike[str]) -> Iterator[bool]:
    """Lock an existing folder for the block, which gets True, or False where another process has
    locked it. Without locks in the system, every process gets True: run only one there."""
    try:
        import fcntl
    except ImportError:
        yield True
        return
    handle = os.open(folder, os.O_RDONLY)
    free = True
    try:
        # The system releases it at the end of the process, even of a killed one.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        free = not isinstance(error, BlockingIOError)
    try:
        yield free
    finally:
        os.close(handle)


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary path beside `path` that replaces it when the block succeeds, and is removed
    when it fails."""
    target = Path(path)
    handle, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix
    )
    os.close(handle)
    try:
        yield name
        # mkstemp makes private files: give the permissions that open() would have given.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, target)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError) and not error.filename:  # errors of writing do not name it
            error.filename = str(target)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole file, or on failure none."""
    with atomic_path(path) as name:
        Path(name).write_text(text, encoding="utf-8")
