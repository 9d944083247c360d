"""Read documents from files and from datasets on the hub, and name the row of each error."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corecontext.data.readers import KINDS, ending_of, kind_of, numbered_lines, read_text_file
from corecontext.files import UserError, first_line

HUB = "hub:"
"""Begins the name of a dataset on the hub."""


class Fields(NamedTuple):
    """The fields of a row to read; "meta.text" is the field text of the object in field meta."""

    text: str = "text"
    """Field with the text."""
    source: str | None = None
    """Field with the kind of text, a document's source; None gives all the source ""."""


class HubName(NamedTuple):
    """The parts of hub:NAME[@REVISION][:CONFIG[:SPLIT]], a dataset on the hub or a folder that
    `datasets.load_dataset` takes."""

    identifier: str
    revision: str | None
    config: str | None
    split: str

    @classmethod
    def parse(cls, name: str) -> HubName:
        """Split such a name.

        Raises:
            UserError: the name has no identifier, or more than three parts.
        """
        identifier, *rest = name.removeprefix(HUB).split(":")
        identifier, _, revision = identifier.partition("@")
        if not identifier or len(rest) > 2:
            raise UserError(
                "data must name a hub dataset as hub:NAME[@REVISION][:CONFIG[:SPLIT]], got "
                f"'{name}'."
            )
        config, split = (*rest, "", "")[:2]
        return cls(identifier, revision or None, config or None, split or "train")

    def load(self, *, cache_dir: str | None, streaming: bool = False) -> Any:
        """Return the split's rows, a `datasets.Dataset` or `IterableDataset`.

        Raises:
            UserError: the dataset cannot be loaded.
        """
        import datasets

        try:
            return datasets.load_dataset(
                self.identifier,
                self.config,
                split=self.split,
                revision=self.revision,
                cache_dir=cache_dir,
                streaming=streaming,
            )
        except Exception as error:  # the hub raises many kinds, none of them a bug of this program
            reason = first_line(error)
            raise UserError(f"dataset '{self.identifier}' cannot be had: {reason}") from None

    def documents(self, rows: Iterable[dict[str, Any]], fields: Fields) -> Iterator[dict[str, str]]:
        """Yield text, source and origin of each row of the dataset that has text: many rows of
        public datasets have none.

        Raises:
            UserError: no row has text; the hub does not answer, after the retries of `datasets`; or
                as `document`.
        """
        has_text = False
        numbered = enumerate(rows, 1)
        while True:
            try:
                number, row = next(numbered, (0, None))
            except Exception as error:  # of as many kinds as in `load`
                raise UserError(
                    f"dataset '{self.identifier}' cannot be read on: {first_line(error)}."
                ) from None
            if row is None:
                break
            where = f"{self.identifier}:{number}"
            if field(row, fields.text, where) is None:
                continue
            if (result := document(row, where, fields)) is not None:
                has_text = True
                yield result
        if not has_text:
            raise UserError(
                f"dataset '{self.identifier}' must hold text, got none. Look at --data and "
                "--text-field."
            )


def documents(paths: Sequence[str | Path], fields: Fields) -> Iterator[dict[str, str]]:
    """Yield text, source and origin of each document that is not empty."""
    for path in map(Path, paths):
        kind = kind_of(path)
        if kind == "text":
            rows: Any = [(1, {"text": read_text_file(path)})]
            row_fields = Fields()
        else:
            rows = numbered_lines(path) if kind == "lines" else _parquet_rows(path, fields)
            row_fields = fields
        for number, row in rows:
            if (result := document(row, f"{path}:{number}", row_fields)) is not None:
                yield result


def document(row: dict[str, Any], where: str, fields: Fields) -> dict[str, str] | None:
    """Return a row's text, source and origin, which is `where`; None where the text is empty.

    Args:
        where: File or dataset, and number of the row from 1, "NAME:NUMBER".

    Raises:
        UserError: a field is missing, or the text is not a string or not valid Unicode.
    """
    text = field(row, fields.text, where)
    file, _, line = where.rpartition(":")
    place = f"file '{file}', line {line}: field '{fields.text}'"
    if not isinstance(text, str):
        raise UserError(f"{place} must be text, got {type(text).__name__}.")
    if not text.strip():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair
        raise UserError(
            f"{place} must be Unicode text, got half a character, {text[error.start]!a}."
        ) from None
    source = "" if fields.source is None else field(row, fields.source, where)
    return {"text": text, "source": str(source), "origin": where}


def field(row: dict[str, Any], name: str, where: str) -> Any:
    """Return the value of a row's field; dots in the name go into objects, as in `Fields`."""
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            file, _, line = where.rpartition(":")
            raise UserError(
                f"file '{file}', line {line}: field '{name}' is missing, got {', '.join(row)}. "
                "Use --text-field or --source-field."
            )
        value = value[key]
    return value


def files_of(name: str) -> list[Path]:
    """Return the data files that a name stands for: the file, or all in the folder.

    Raises:
        UserError: there are none.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and kind_of(file))
        if not files:
            raise UserError(
                f"data '{name}' must hold .txt, .jsonl or .parquet files, got a folder without any."
            )
        return files
    if not path.is_file():
        raise UserError(
            f"data '{name}' does not exist. Give a file, a folder, or hub:NAME for a dataset on "
            "the hub."
        )
    if not kind_of(path):
        raise UserError(
            f"file '{path}' must end in {', '.join(itertools.chain(*KINDS.values()))}, packed or "
            f"not, got '{ending_of(path)}'."
        )
    return [path]


def _parquet_rows(path: Path, fields: Fields) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1, row) of a parquet file, with only those columns that have `fields`."""
    import pyarrow
    from pyarrow import parquet

    columns = sorted({name.split(".")[0] for name in fields if name is not None})
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        missing = [name for name in columns if name not in names]
        if missing:
            raise UserError(
                f"file '{path}' must have a column '{missing[0]}', got {', '.join(names)}. "
                "Use --text-field."
            )
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"file '{path}' cannot be read as parquet: {error}") from None
