"""Write tokens and their log-probabilities in the OpenAI protocol's form."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from corecontext.serve.request import TokenLogprobs

BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""Bytes of the letters with which tokens of bytes are written."""


class TokenText:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)
        self.text = functools.lru_cache(2**16)(self._text)
        # Some tokenizers drop the space before a first word, so a token is decoded behind another.
        self._anchor = tokenizer("a", add_special_tokens=False)["input_ids"]

    def _text(self, token: int) -> tuple[str, bytes]:
        """Return a token's text, and its bytes: of a part of a character the text is OpenAI's
        writing of bytes."""
        before = self._decode(self._anchor)
        text = self._decode([*self._anchor, token])[len(before) :]
        if "\ufffd" not in text:
            return text, text.encode()
        name = self.tokenizer.convert_ids_to_tokens(token)
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)
        if byte:
            raw = bytes.fromhex(byte[1])
        elif all(letter in BYTE_OF for letter in name):
            raw = bytes(BYTE_OF[letter] for letter in name)
        else:
            return text, text.encode()
        return "".join(f"\\x{number:02x}" for number in raw), raw

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def shown(self, token: int) -> bytes:
        """Return a token's bytes in a text, which leaves special tokens out."""
        return b"" if token in self.special else self.text(token)[1]

    def length(self, tokens: Iterable[int]) -> int:
        """Return the characters of a text of these tokens."""
        return len(b"".join(map(self.shown, tokens)).decode(errors="replace"))


class LogprobsWriter:
    """Write the log-probabilities of one choice, as far as its text has come.

    Args:
        texts: Of its tokens.
        chat: Whether it answers a chat.
        start: Characters before its first token.
    """

    def __init__(self, texts: TokenText, chat: bool, start: int) -> None:
        self.texts = texts
        self.chat = chat
        self.offset = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[TokenLogprobs] = []

    def write(self, records: list[TokenLogprobs], end: float) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens that begin before character `end` and were not
        yet written, or None where there are none; the others wait. Takes the records."""
        self._pending += records
        records.clear()
        written = []
        offsets = []
        while self._pending and self.offset < end:
            record = self._pending.pop(0)
            written.append(record)
            offsets.append(max(0, self.offset))
            self.offset += len(self._decoder.decode(self.texts.shown(record.token)))
        if not written:
            return None
        if self.chat:
            return {"content": [self._of_chat(record) for record in written], "refusal": None}
        return {
            "tokens": [self._name(record.token) for record in written],
            "token_logprobs": [record.logprob for record in written],
            "top_logprobs": [self._top(record) for record in written],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        text, raw = self.texts.text(token)
        if text.encode() != raw:
            return f"bytes:{text}"
        return text

    def _top(self, record: TokenLogprobs) -> dict[str, float] | None:
        """Return the likeliest tokens, and the token itself; of two with one text the likelier."""
        if record.logprob is None or not record.top:
            return None
        named: dict[str, float] = {}
        for token, logprob in (*record.top, (record.token, record.logprob)):
            named.setdefault(self._name(token), logprob)
        return named

    def _of_chat(self, record: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in record.top or ()]
        return {**self._entry(record.token, record.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, raw = self.texts.text(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}
