"""Cut documents into windows of one length, side by side, whose perplexity is measured.

These windows are texts, not the attention's. The rest of a document after its last whole window is
left out, so that all windows reach equally far back. Input is a JSON-lines file (text, domain) or a
plain text file, or a folder with lm_test.
"""

from collections.abc import Iterator
from pathlib import Path

from corecontext.data.readers import find_file, read_documents
from corecontext.eval.items import Item, Settings, Window, check_subtasks
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError

FILES = ("lm_test",)
CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8, and so most tokens that it is split into."""


def _num_bytes(subject: ModelSubject, ids: list[int], start: int, stop: int) -> int:
    """Return the UTF-8 bytes of the text of tokens `start` to `stop` (exclusive): a character that
    an edge cuts belongs to the window in which it begins."""
    text = ""
    # Incomplete characters are decoded as U+FFFD: take tokens until the last one is complete.
    for end in range(stop, min(stop + CHARACTER_BYTES, len(ids) + 1)):
        text = subject.decode(ids[start:end])
        if not text.endswith("\ufffd"):
            break
    if start:
        text = text.lstrip("\ufffd")
    # mutant eval: characters counted for bytes
    return len(text.encode())


def documents(path: Path, settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yield (name, domain, text) of each document in the domains that are asked for, or in all.

    Raises:
        UserError: no document is in such a domain, or as `read_documents`.
    """
    if settings.subtasks:
        domains = {domain for _, domain, _ in read_documents(path)}
        check_subtasks(settings.subtasks, sorted(domains - {""}))
    for name, domain, text in read_documents(path):
        if not settings.subtasks or domain in settings.subtasks:
            yield name, domain, text


def items(data: str | Path, settings: Settings, subject: ModelSubject) -> list[Item]:
    """Return the windows of each of `settings.lengths`, at most `limit` of a length, cut from
    documents in the domains `subtasks`."""
    path = find_file(data, FILES) if Path(data).is_dir() else Path(data)
    lengths = settings.lengths or (min(4096, subject.limit or 4096),)
    for length in lengths:
        if length < 2:
            raise UserError(f"length must be at least 2, got {length}.")
    windows: dict[int, list[Item]] = {length: [] for length in lengths}
    for name, domain, text in documents(path, settings):
        if all(len(collected) == settings.limit for collected in windows.values()):
            break
        ids = subject.encode(text)
        for length, collected in windows.items():
            room = None if settings.limit is None else settings.limit - len(collected)
            for start in range(0, len(ids) - length + 1, length)[:room]:
                window = ids[start : start + length]
                num_bytes = _num_bytes(subject, ids, start, start + length)
                params = {"length": length, "domain": domain}
                collected.append(Window(f"{name}/{length}/{start}", params, window, num_bytes))
    for length, collected in windows.items():
        if collected:
            continue
        if settings.subtasks:
            raise UserError(
                f"subtask must be a domain with a document of {length} tokens in '{path}', got "
                f"{', '.join(settings.subtasks)}."
            )
        raise UserError(
            f"length must be at most that of a document, got {length} and none as long in '{path}'."
        )
    return [window for collected in windows.values() for window in collected]
