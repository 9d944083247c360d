"""Texts as token numbers: read from files or the hub by `datasets`, tokenised in parallel, cached
on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from corecontext.data.documents import HUB, HubName, documents, files_of
from corecontext.files import UserError


def read_corpus(
    names: Sequence[str],
    tokenizer: Any,
    *,
    text_field: str = "text",
    source_field: str | None = None,
    workers: int = 1,
    cache_dir: str | None = None,
) -> Any:
    """Every document of some files, folders and hub datasets as token numbers, a
    `datasets.Dataset`.

    Args:
        names: Files (.txt and .md are one document each; .jsonl, packed or not, and .parquet one a
            row), folders of such files, or "hub:NAME[@REVISION][:CONFIG[:SPLIT]]" for a dataset on
            the Hugging Face hub, or a folder that `datasets.load_dataset` takes; split "train"
            where none is given.
        text_field: Where rows have their text; dots go into objects ("meta.text").
        source_field: Where rows say what kind of text they are; documents without it are of the
            source "".
        workers: Processes that tokenise.
        cache_dir: Where tokens are kept for the next time; default that of `datasets`.

    Returns:
        Columns input_ids (with the tokenizer's beginning, and its end of text after each document),
        length, source and origin (file and line, for messages). Memory-mapped.

    Raises:
        UserError: a file is missing, broken (says where) or holds no text, or a hub dataset is not
            to be had.
    """
    import datasets

    check_named(names)
    files = [path for name in names if not name.startswith(HUB) for path in files_of(name)]
    parts = []
    if files:
        stamps = [
            f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files
        ]
        fields = {"text_field": text_field, "source_field": source_field}
        rows = _unwrapped(
            lambda: datasets.Dataset.from_generator(
                documents,
                gen_kwargs={"paths": [str(path) for path in files], **fields},
                cache_dir=cache_dir,
                features=_features(datasets),
                fingerprint=_digest(*stamps, text_field, source_field),
                num_proc=min(workers, len(files)) if workers > 1 and len(files) > 1 else None,
            )
        )
        parts.append(rows)
    for name in names:
        if name.startswith(HUB):
            parts.append(_hub(HubName.parse(name), text_field, source_field, cache_dir))
    made = [_tokenise(part, tokenizer, workers) for part in parts]
    return made[0] if len(made) == 1 else datasets.concatenate_datasets(made)


def check_named(names: Sequence[str]) -> None:
    """Raise where no data is named."""
    if not names:
        raise UserError(
            "data must name at least one file, folder or hub dataset, got none. Use --data."
        )


def encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """What makes token numbers of documents: with the tokenizer's beginning, and its end of text
    after each."""
    ends = tokenizer.eos_token_id

    def encode(texts: list[str]) -> list[list[int]]:
        ids = tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"]
        return (
            ids
            if ends is None
            else [one if one and one[-1] == ends else [*one, ends] for one in ids]
        )

    return encode


def _tokenise(rows: Any, tokenizer: Any, workers: int) -> Any:
    """Token numbers of each row's text."""
    encode = encoder(tokenizer)

    def tokens(batch: dict[str, list]) -> dict[str, list]:
        ids = encode(batch["text"])
        return {"input_ids": ids, "length": [len(one) for one in ids]}

    import datasets

    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "length": datasets.Value("int64"),
            "source": datasets.Value("string"),
            "origin": datasets.Value("string"),
        }
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # A tokenizer's own pickle changes with use; what it makes of text does not.
    what = _digest(
        rows._fingerprint,
        backend.to_str() if backend is not None else repr(tokenizer),
        tokenizer.eos_token_id,
    )
    return _unwrapped(
        lambda: rows.map(
            tokens,
            batched=True,
            batch_size=64,
            num_proc=workers if workers > 1 else None,
            features=features,
            remove_columns=["text"],
            new_fingerprint=what,
            desc="tokens",
        )
    )


def _hub(name: HubName, text_field: str, source_field: str | None, cache_dir: str | None) -> Any:
    """A dataset on the hub in the columns of `documents`."""
    rows = name.load(cache_dir=cache_dir)

    def chosen(batch: dict[str, list], numbers: list[int]) -> dict[str, list]:
        found = [
            name.document(
                {key: values[i] for key, values in batch.items()},
                number + 1,
                text_field,
                source_field,
            )
            for i, number in enumerate(numbers)
        ]
        return {
            key: [one[key] for one in found if one is not None]
            for key in ("text", "source", "origin")
        }

    import datasets

    found = _unwrapped(
        lambda: rows.map(
            chosen,
            batched=True,
            batch_size=64,
            with_indices=True,
            remove_columns=rows.column_names,
            features=_features(datasets),
            desc=name.identifier,
        )
    )
    if not len(found):
        raise UserError(
            f"dataset '{name.identifier}' must hold text, got none. Look at --data and --text-field."
        )
    return found


def _features(datasets: Any) -> Any:
    return datasets.Features(
        {name: datasets.Value("string") for name in ("text", "source", "origin")}
    )


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _unwrapped(make: Any) -> Any:
    """`datasets` wraps what a generator raises; the user wants to read the UserError inside."""
    try:
        return make()
    except Exception as error:
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, UserError):
            if isinstance(inner, OSError) and inner.errno is not None:
                raise UserError(
                    f"tokens cannot be kept: {inner.strerror}. Free space, or give another folder with "
                    "--cache-dir."
                ) from None
            inner = inner.__cause__ or inner.__context__
        if inner is None and "corresponds to no data" in str(
            error
        ):  # what datasets says of a generator of nothing
            raise UserError(
                "data must hold text, got none. Look at --data and --text-field."
            ) from None
        if inner is None:
            raise
        raise UserError(str(inner)) from None
