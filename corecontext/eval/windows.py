"""Perplexity of many documents: each is cut into windows of the length, and every token is
predicted once.

What a document has beyond its last whole window is left out, so that all windows reach equally far
back. Input is a JSON-lines file (text, domain) or a plain text file, or a folder with lm_test.
"""

from __future__ import annotations

from pathlib import Path

from corecontext.data.readers import find_file, read_documents
from corecontext.eval.items import Item, Settings, Window
from corecontext.eval.subject import Subject
from corecontext.files import UserError

FILES = ("lm_test",)


def items(data: str | Path, settings: Settings, subject: Subject) -> list[Item]:
    """The windows of each length; `limit` is by length, subtasks are domains."""
    path = find_file(data, FILES) if Path(data).is_dir() else Path(data)
    lengths = settings.lengths or (min(4096, subject.limit or 4096),)
    for length in lengths:
        if length < 2:
            raise UserError(f"length must be at least 2, got {length}.")
    found: dict[int, list[Item]] = {length: [] for length in lengths}
    for name, domain, text in read_documents(path):
        if settings.subtasks and domain not in settings.subtasks:
            continue
        if settings.limit is not None and all(
            len(some) >= settings.limit for some in found.values()
        ):
            break
        ids = subject.encode(text)
        for length, some in found.items():
            for start in range(0, len(ids) - length + 1, length):
                if settings.limit is not None and len(some) >= settings.limit:
                    break
                part = ids[start : start + length]
                some.append(
                    Window(
                        f"{name}/{length}/{start}",
                        {"length": length, "domain": domain},
                        part,
                        len(subject.decode(part).encode()),
                    )
                )
    for length, some in found.items():
        if not some and settings.subtasks:
            raise UserError(
                f"subtask must be a domain with a document of {length} tokens in '{path}', got "
                f"{', '.join(settings.subtasks)}."
            )
        if not some:
            raise UserError(
                f"length must be at most that of a document, got {length} and none as long in '{path}'."
            )
    return [one for some in found.values() for one in some]
