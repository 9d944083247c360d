"""Documents as they lie in files and on the hub: which rows have which text, and what is said of
broken ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corecontext.data.readers import is_broken, numbered_lines, open_text
from corecontext.files import UserError

HUB = "hub:"
_TEXTS = (".txt", ".md", ".text")
_LINES = (".jsonl", ".ndjson")
_PACKED = (".xz", ".gz", ".bz2", ".zst")


class HubName(NamedTuple):
    """A dataset on the hub, or a folder that `datasets.load_dataset` takes:
    hub:NAME[@REVISION][:CONFIG[:SPLIT]]."""

    identifier: str
    revision: str | None
    config: str | None
    split: str

    @classmethod
    def parse(cls, name: str) -> HubName:
        """The parts of such a name.

        Raises:
            UserError: it has no identifier, or more than three parts.
        """
        identifier, *rest = name.removeprefix(HUB).split(":")
        identifier, _, revision = identifier.partition("@")
        if not identifier or len(rest) > 2:
            raise UserError(
                f"data must name a hub dataset as hub:NAME[@REVISION][:CONFIG[:SPLIT]], got '{name}'."
            )
        config, split = (*rest, "", "")[:2]
        return cls(identifier, revision or None, config or None, split or "train")

    def load(self, *, cache_dir: str | None, streaming: bool = False) -> Any:
        """The split's rows, a `datasets.Dataset` or `IterableDataset`.

        Raises:
            UserError: it is not to be had.
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
        except (
            Exception
        ) as error:  # the hub's errors are of many kinds, and none is this program's fault
            told = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"dataset '{self.identifier}' cannot be had: {told}") from None

    def document(
        self, row: dict[str, Any], number: int, text_field: str, source_field: str | None
    ) -> dict[str, str] | None:
        """As `document`; a row without text, of which public datasets have many, is none."""
        where = f"{self.identifier}:{number}"
        if field(row, text_field, where) is None:
            return None
        return document(row, where, text_field, source_field)


def documents(
    paths: Sequence[str | Path], text_field: str, source_field: str | None
) -> Iterator[dict[str, str]]:
    """Text, source and origin of each document that is not empty."""
    for path in map(Path, paths):
        kind = kind_of(path)
        if kind == "text":
            if one := document({"text": _whole(path)}, f"{path}:1", "text", None):
                yield one
            continue
        for number, row in (
            numbered_lines(path) if kind == "lines" else _parquet(path, text_field, source_field)
        ):
            if one := document(row, f"{path}:{number}", text_field, source_field):
                yield one


def document(
    row: dict[str, Any], where: str, text_field: str, source_field: str | None
) -> dict[str, str] | None:
    """The text, source and origin in a row; None where the text is empty.

    Args:
        where: File, or dataset, and number of the row, "NAME:NUMBER".

    Raises:
        UserError: a field is missing, or the text is none.
    """
    text, (file, _, line) = field(row, text_field, where), where.rpartition(":")
    if not isinstance(text, str):
        raise UserError(
            f"file '{file}', line {line}: field '{text_field}' must be text, got {type(text).__name__}."
        )
    if not text.strip():
        return None
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON may spell what UTF-8 cannot
            raise UserError(
                f"file '{file}', line {line}: field '{text_field}' must be Unicode text, got half a "
                f"character, {text[error.start]!a}."
            ) from None
    source = "" if source_field is None else field(row, source_field, where)
    return {"text": text, "source": str(source), "origin": where}


def field(row: dict[str, Any], name: str, where: str) -> Any:
    """The value under a name, whose dots go into objects."""
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
    """The files that a name stands for.

    Raises:
        UserError: there are none.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and kind_of(p, strict=False))
        if not found:
            raise UserError(
                f"data '{name}' must hold .txt, .jsonl or .parquet files, got a folder without any."
            )
        return found
    if not path.is_file():
        raise UserError(
            f"data '{name}' does not exist. Give a file, a folder, or hub:NAME for a dataset on the hub."
        )
    kind_of(path)
    return [path]


def kind_of(path: Path, strict: bool = True) -> str:
    """ "text", "lines" or "parquet" by a file's ending; "" for others unless strict."""
    ending = path.with_suffix("").suffix if path.suffix in _PACKED else path.suffix
    for kind, endings in (("text", _TEXTS), ("lines", _LINES), ("parquet", (".parquet",))):
        if ending in endings:
            return kind
    if strict:
        raise UserError(
            f"file '{path}' must end in {', '.join((*_TEXTS, *_LINES, '.parquet'))}, packed or not, got "
            f"'{ending}'."
        )
    return ""


def _whole(path: Path) -> str:
    """The text of a file."""
    with open_text(path) as file:
        try:
            return file.read()
        except Exception as error:
            if not is_broken(error):
                raise
            raise UserError(f"file '{path}' must be UTF-8 text: {error}") from None


def _parquet(
    path: Path, text_field: str, source_field: str | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of a parquet file with the columns that are asked for, numbered from 1."""
    import pyarrow
    from pyarrow import parquet

    wanted = {name.split(".")[0] for name in (text_field, source_field) if name is not None}
    try:
        file = parquet.ParquetFile(path)
        missing = wanted - set(file.schema_arrow.names)
        if missing:
            raise UserError(
                f"file '{path}' must have a column '{sorted(missing)[0]}', got "
                f"{', '.join(file.schema_arrow.names)}. Use --text-field."
            )
        number = 0
        for batch in file.iter_batches(batch_size=256, columns=sorted(wanted)):
            for row in batch.to_pylist():
                yield (number := number + 1), row
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"file '{path}' cannot be read as parquet: {error}") from None
