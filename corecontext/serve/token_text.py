"""Return the text and the bytes of single tokens, also of parts of characters."""

import functools
import re
from collections.abc import Iterable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from corecontext.serve.text import BROKEN

BYTE_OF = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The byte of each letter in the names of byte-level tokens: "Ġ" is a space."""


class TokenText:
    """The text and the bytes of single tokens: `text` and `shown` cache `_text` and `_shown`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = functools.lru_cache(2**16)(self._text)
        self.shown = functools.lru_cache(2**16)(self._shown)
        # Some tokenizers drop the space before a first word, so a token is decoded after another.
        self._anchor = tokenizer("a", add_special_tokens=False)["input_ids"]

    def _text(self, token: int) -> tuple[str, bytes]:
        """Return a token's (text, bytes). The text of a part of a character is its bytes as OpenAI
        writes them, such as \\xe2\\x82."""
        before = self._decode(self._anchor)
        text = self._decode([*self._anchor, token])[len(before) :]
        if BROKEN not in text:
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

    def _decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _shown(self, token: int) -> bytes:
        """Return a token's bytes in a text: none for a special token."""
        text = self._decode([*self._anchor, token], skip_special_tokens=True)
        is_special = text == self._decode(self._anchor)
        return b"" if is_special else self.text(token)[1]

    def length(self, tokens: Iterable[int]) -> int:
        """Count the characters of the text of these tokens."""
        return len(b"".join(map(self.shown, tokens)).decode(errors="replace"))
