"""Texts as token numbers: read from files or the hub by `datasets`, tokenised in parallel, cached on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from corecontext.data.files import numbered_lines, open_text
from corecontext.text import UserError

HUB = "hub:"
_TEXTS = (".txt", ".md", ".text")
_LINES = (".jsonl", ".ndjson")
_PACKED = (".xz", ".gz", ".bz2", ".zst")


def read_corpus(names: Sequence[str], tokenizer: Any, *, text_field: str = "text", source_field: str | None = None,
                workers: int = 1, cache_dir: str | None = None) -> Any:
    """Every document of some files, folders and hub datasets as token numbers, a `datasets.Dataset`.

    Args:
        names: Files (.txt and .md are one document each; .jsonl, packed or not, and .parquet one a row), folders of
            such files, or "hub:NAME", "hub:NAME:CONFIG" for a split "train" on the Hugging Face hub.
        text_field: Where rows have their text; dots go into objects ("meta.text").
        source_field: Where rows say what kind of text they are; documents without it are of the source "".
        workers: Processes that tokenise.
        cache_dir: Where tokens are kept for the next time; default that of `datasets`.

    Returns:
        Columns input_ids (with the tokenizer's beginning, and its end of text after each document), length, source and
        origin (file and line, for messages). Memory-mapped.

    Raises:
        UserError: a file is missing, broken (says where) or holds no text, or a hub dataset is not to be had.
    """
    import datasets

    files = [path for name in names if not name.startswith(HUB) for path in _files(name)]
    if not names:
        raise UserError("data must name at least one file, folder or hub dataset, got none. Use --data.")
    parts = []
    if files:
        stamps = [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        fields = {"text_field": text_field, "source_field": source_field}
        rows = _unwrapped(lambda: datasets.Dataset.from_generator(
            _documents, gen_kwargs={"paths": [str(path) for path in files], **fields}, cache_dir=cache_dir,
            features=_features(datasets), fingerprint=_digest(*stamps, text_field, source_field),
            num_proc=min(workers, len(files)) if workers > 1 and len(files) > 1 else None))
        parts.append(rows)
    for name in names:
        if name.startswith(HUB):
            parts.append(_hub(name, text_field, source_field, cache_dir))
    ends = tokenizer.eos_token_id
    made = [_tokenise(part, tokenizer, ends, workers) for part in parts]
    whole = made[0] if len(made) == 1 else datasets.concatenate_datasets(made)
    return whole


def _tokenise(rows: Any, tokenizer: Any, ends: int | None, workers: int) -> Any:
    """Token numbers of each row's text."""
    def encode(batch: dict[str, list]) -> dict[str, list]:
        ids = tokenizer(batch["text"], verbose=False, return_attention_mask=False)["input_ids"]
        if ends is not None:
            ids = [one if one and one[-1] == ends else [*one, ends] for one in ids]
        return {"input_ids": ids, "length": [len(one) for one in ids]}

    import datasets

    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32")),
                                  "length": datasets.Value("int64"), "source": datasets.Value("string"),
                                  "origin": datasets.Value("string")})
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A tokenizer's own pickle changes with use; what it makes of text does not.
    what = _digest(rows._fingerprint, backend.to_str() if backend is not None else repr(tokenizer), ends)
    return rows.map(encode, batched=True, batch_size=64, num_proc=workers if workers > 1 else None, features=features,
                    remove_columns=["text"], new_fingerprint=what, desc="tokens")


def _documents(paths: Sequence[str], text_field: str, source_field: str | None) -> Iterator[dict[str, str]]:
    """Text, source and origin of each document that is not empty."""
    for name in paths:
        path = Path(name)
        kind = _kind(path)
        if kind == "text":
            with open_text(path) as file:
                try:
                    rows: Any = [(1, {text_field: file.read()})]
                except (UnicodeDecodeError, OSError, EOFError) as error:
                    raise UserError(f"file '{path}' must be UTF-8 text: {error}") from None
        else:
            rows = numbered_lines(path) if kind == "lines" else _parquet(path, text_field, source_field)
        for number, row in rows:
            where = f"{path}:{number}"
            text = _field(row, text_field, where)
            if not isinstance(text, str):
                raise UserError(f"file '{path}', line {number}: field '{text_field}' must be text, got "
                                f"{type(text).__name__}.")
            if text.strip():
                source = "" if source_field is None or kind == "text" else _field(row, source_field, where)
                yield {"text": text, "source": str(source), "origin": where}


def _parquet(path: Path, text_field: str, source_field: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a parquet file with the columns that are asked for, numbered from 1."""
    import pyarrow
    from pyarrow import parquet

    wanted = {name.split(".")[0] for name in (text_field, source_field) if name is not None}
    try:
        file = parquet.ParquetFile(path)
        missing = wanted - set(file.schema_arrow.names)
        if missing:
            raise UserError(f"file '{path}' must have a column '{sorted(missing)[0]}', got "
                            f"{', '.join(file.schema_arrow.names)}. Use --text-field.")
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=sorted(wanted)):
            for row in batch.to_pylist():
                yield (number := number + 1), row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"file '{path}' cannot be read as parquet: {error}") from None


def _hub(name: str, text_field: str, source_field: str | None, cache_dir: str | None) -> Any:
    """The split "train" of a dataset on the hub, in the columns of `_documents`."""
    import datasets

    identifier, _, config = name.removeprefix(HUB).partition(":")
    try:
        rows = datasets.load_dataset(identifier, config or None, split="train", cache_dir=cache_dir)
    except Exception as error:  # the hub's errors are of many kinds, and none is this program's fault
        raise UserError(f"dataset '{identifier}' cannot be had: {str(error).splitlines()[0]}") from None

    def chosen(row: dict[str, Any], index: int) -> dict[str, str]:
        where = f"{identifier}:{index + 1}"
        source = "" if source_field is None else str(_field(row, source_field, where))
        return {"text": str(_field(row, text_field, where)), "source": source, "origin": where}

    return _unwrapped(lambda: rows.map(chosen, with_indices=True, remove_columns=rows.column_names,
                                       features=_features(datasets), desc=identifier))


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    """The value under a name, whose dots go into objects."""
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            file, _, line = where.rpartition(":")
            raise UserError(f"file '{file}', line {line}: field '{name}' is missing, got {', '.join(row)}. "
                            "Use --text-field or --source-field.")
        value = value[key]
    return value


def _files(name: str) -> list[Path]:
    """The files that a name stands for."""
    path = Path(name).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p, strict=False))
        if not found:
            raise UserError(f"data '{name}' must hold .txt, .jsonl or .parquet files, got a folder without any.")
        return found
    if not path.is_file():
        raise UserError(f"data '{name}' does not exist. Give a file, a folder, or hub:NAME for a dataset on the hub.")
    _kind(path)
    return [path]


def _kind(path: Path, strict: bool = True) -> str:
    """ "text", "lines" or "parquet" by a file's ending; "" for others unless strict."""
    ending = path.with_suffix("").suffix if path.suffix in _PACKED else path.suffix
    for kind, endings in (("text", _TEXTS), ("lines", _LINES), ("parquet", (".parquet",))):
        if ending in endings:
            return kind
    if strict:
        raise UserError(f"file '{path}' must end in {', '.join((*_TEXTS, *_LINES, '.parquet'))}, packed or not, got "
                        f"'{ending}'.")
    return ""


def _features(datasets: Any) -> Any:
    return datasets.Features({name: datasets.Value("string") for name in ("text", "source", "origin")})


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _unwrapped(make: Any) -> Any:
    """`datasets` wraps what a generator raises; the user wants to read the UserError inside."""
    try:
        return make()
    except Exception as error:
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, UserError):
            inner = inner.__cause__ or inner.__context__
        if inner is None and "corresponds to no data" in str(error):  # what datasets says of a generator of nothing
            raise UserError("data must hold text, got none. Look at --data and --text-field.") from None
        if inner is None:
            raise
        raise UserError(str(inner)) from None
