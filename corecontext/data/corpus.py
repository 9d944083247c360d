"""Turn texts from files or the hub into token ids: tokenised in parallel, cached on disk."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from corecontext.data.documents import HUB, Fields, HubName, documents, files_of
from corecontext.files import UserError

NO_TEXT = "data must hold text, got none. Look at --data and --text-field."


def read_corpus(
    names: Sequence[str],
    tokenizer: Any,
    *,
    text_field: str = "text",
    source_field: str | None = None,
    workers: int = 1,
    cache_dir: str | None = None,
) -> Any:
    """Return the token ids of every document of some files, folders and hub datasets, a
    `datasets.Dataset`.

    Args:
        names: Files (.txt and .md are one document each; .jsonl, compressed or not, and .parquet
            one a row), folders of such files, or "hub:NAME[@REVISION][:CONFIG[:SPLIT]]" for a
            dataset on the Hugging Face hub, or a folder that `datasets.load_dataset` takes; the
            default split is "train".
        text_field: Field of a row with the text; "meta.text" is field text of the object in meta.
        source_field: Field with the kind of text; None gives all documents the source "".
        workers: Processes that tokenise.
        cache_dir: Folder for tokens, which a later call reads again; default that of `datasets`.

    Returns:
        Columns input_ids (of `encoder`), length (tokens), source (kind of text) and origin (file
        and line, for messages), memory-mapped.

    Raises:
        UserError: a file is missing, broken (says where) or holds no text, or a hub dataset cannot
            be loaded.
    """
    import datasets

    check_named(names)
    fields = Fields(text_field, source_field)
    files = [path for name in names if not name.startswith(HUB) for path in files_of(name)]
    text_datasets = []
    if files:
        # The first document shows most errors in the data before any bar of progress.
        if next(documents(files, fields), None) is None:
            raise UserError(NO_TEXT)
        text_datasets.append(
            _generated(
                documents,
                {"paths": [str(path) for path in files], "fields": fields},
                _text_features(),
                (*_stamps(files), *fields),
                cache_dir,
                min(workers, len(files)),
            )
        )
    for name in names:
        if name.startswith(HUB):
            hub_name = HubName.parse(name)
            rows = hub_name.load(cache_dir=cache_dir)
            arguments = {"rows": rows, "fields": fields}
            key = (rows._fingerprint, *hub_name, *fields)
            generator = hub_name.documents
            texts = _generated(generator, arguments, _text_features(), key, cache_dir)
            text_datasets.append(texts)
    corpora = [_tokenise(texts, tokenizer, workers) for texts in text_datasets]
    if len(corpora) == 1:
        return corpora[0]
    return datasets.concatenate_datasets(corpora)


def read_beginning(
    names: Sequence[str],
    tokenizer: Any,
    tokens: int,
    fields: Fields,
    *,
    shuffle: int = 1000,
    seed: int = 0,
    cache_dir: str | None = None,
) -> Any:
    """Return the dataset of `read_corpus` for only so many documents as have `tokens` tokens; no
    more are read or received from the hub.

    Args:
        names: As of `read_corpus`; documents are taken from each in turn.
        shuffle: Documents of a hub dataset that are shuffled together, by `seed`; the files of the
            dataset come in random order, too.

    Raises:
        UserError: as `read_corpus`, or the hub does not answer, after the retries of `datasets`.
    """
    check_named(names)
    encode = encoder(tokenizer)
    files = {name: files_of(name) for name in names if not name.startswith(HUB)}

    def documents_of(name: str) -> Iterator[dict[str, str]]:
        if name in files:
            return documents(files[name], fields)
        hub_name = HubName.parse(name)
        rows = hub_name.load(cache_dir=cache_dir, streaming=True)
        return hub_name.documents(rows.shuffle(seed=seed, buffer_size=shuffle), fields)

    def tokenised() -> Iterator[dict[str, Any]]:
        rounds = itertools.zip_longest(*map(documents_of, names))
        in_turn = filter(None, itertools.chain.from_iterable(rounds))
        count = 0
        # 16 at once: the tokenizer encodes them in parallel.
        while count < tokens and (batch := list(itertools.islice(in_turn, 16))):
            for document, ids in zip(batch, encode([document.pop("text") for document in batch])):
                yield {"input_ids": ids, "length": len(ids), **document}
                count += len(ids)
        if not count:
            raise UserError(NO_TEXT)

    stamps = _stamps(itertools.chain.from_iterable(files.values()))
    key = (*names, *stamps, *fields, tokens, shuffle, seed, *_identity(tokenizer))
    return _generated(tokenised, {}, _token_features(), key, cache_dir)


def _generated(
    generator: Callable[..., Iterator[dict[str, Any]]],
    arguments: dict[str, Any],
    features: Any,
    key: Sequence[Any],
    cache_dir: str | None,
    workers: int = 1,
) -> Any:
    """Return the rows that a generator yields as a dataset, cached on disk under a hash of `key`.
    Arguments that are lists are split among the workers."""
    import datasets

    return _with_user_errors(
        lambda: datasets.Dataset.from_generator(
            generator,
            gen_kwargs=arguments or None,
            cache_dir=cache_dir,
            features=features,
            fingerprint=_digest(*key),
            num_proc=workers if workers > 1 else None,
        )
    )


def check_named(names: Sequence[str]) -> None:
    """Raise a UserError where no data is named."""
    if not names:
        raise UserError(
            "data must name at least one file, folder or hub dataset, got none. Use --data."
        )


def encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Return a function from texts to their token ids: they begin as the tokenizer has it (with
    BOS, or without), and end with its end of text (EOS)."""
    eos = tokenizer.eos_token_id

    def encode(texts: list[str]) -> list[list[int]]:
        batch = tokenizer(texts, verbose=False, return_attention_mask=False)["input_ids"]
        if eos is None:
            return batch
        return [ids if ids and ids[-1] == eos else [*ids, eos] for ids in batch]

    return encode


def _tokenise(rows: Any, tokenizer: Any, workers: int) -> Any:
    """Return the dataset with the columns input_ids and length in place of the text."""
    encode = encoder(tokenizer)

    def tokens(batch: dict[str, list]) -> dict[str, list]:
        input_ids = encode(batch["text"])
        return {"input_ids": input_ids, "length": [len(ids) for ids in input_ids]}

    return _with_user_errors(
        lambda: rows.map(
            tokens,
            batched=True,
            batch_size=64,
            num_proc=workers if workers > 1 else None,
            features=_token_features(),
            remove_columns=["text"],
            new_fingerprint=_digest(rows._fingerprint, *_identity(tokenizer)),
            desc="tokens",
        )
    )


def _text_features() -> Any:
    import datasets

    return datasets.Features(
        {name: datasets.Value("string") for name in ("text", "source", "origin")}
    )


def _token_features() -> Any:
    import datasets

    return datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "length": datasets.Value("int64"),
            "source": datasets.Value("string"),
            "origin": datasets.Value("string"),
        }
    )


def _identity(tokenizer: Any) -> tuple[str, int | None]:
    """Return the content of a tokenizer, for the key of a cache: its pickle, as `datasets` would
    take it, changes with use."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = repr(tokenizer) if backend is None else backend.to_str()
    return content, tokenizer.eos_token_id


def _stamps(files: Iterable[Path]) -> list[str]:
    """Return texts that change when the files do, for the key of a cache."""
    return [f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]


def _digest(*values: Any) -> str:
    """Return a hash of plain values, 16 digits."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _with_user_errors(make: Callable[[], Any]) -> Any:
    """Return `make()`, and raise the UserError inside an error of `datasets`.

    `datasets` wraps an error of a generator in errors of its own; the cause is in their chain. A
    disk without room for the tokens is a UserError too.
    """
    try:
        return make()
    except Exception as error:
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, UserError):
            if isinstance(inner, OSError) and inner.errno is not None:
                raise UserError(
                    f"tokens cannot be kept: {inner.strerror}. Free space, or give another folder "
                    "with --cache-dir."
                ) from None
            inner = inner.__cause__ or inner.__context__
        if inner is not None:
            raise UserError(str(inner)) from None
        raise
