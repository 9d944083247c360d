"""Convert text to tokens, and tokens to text as they come: whole characters, and no stop text."""

import re
from collections.abc import Sequence
from typing import Any

HELD_TOKENS = 64
"""Newest tokens whose text may still change: beyond, it is sent as it stands."""
MOST_BYTES = 4
"""Bytes of a character, at most."""
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Name of a token that is a byte, in tokenizers that write unknown characters so."""


def token_numbers(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Return the token numbers of a prompt's text.

    Args:
        chat: Whether the text is a chat's. A chat template writes special tokens itself, so the
            tokenizer must not add them (a beginning of text) again.
    """
    templated = chat and bool(getattr(tokenizer, "chat_template", None))
    return tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"]


class TextStream:
    """Convert tokens to pieces of text, which add up to the text of all tokens.

    Args:
        tokenizer: A Hugging Face tokenizer.
        stops: Texts that end the answer; neither they nor the text behind them is part of it. They
            may hold special tokens, which are no text otherwise.
        prompt: Tokens that the answer continues: some tokenizers drop the space before the first
            word that they decode.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.stopped = False
        """Whether a stop text was found."""
        self._special = _special_texts(tokenizer, stops)
        self._ids: list[int] = list(prompt[-HELD_TOKENS:])  # decoded with each new token
        # Half a character in the prompt would make the answer's text shorter.
        if self._decode(self._ids).endswith("\ufffd"):
            self._ids = []
        self._whole = len(self._ids)  # tokens whose text was certain at once
        self._text = self._decode(self._ids)
        self._sent = len(self._text)  # characters of it that are certain
        self._held: list[tuple[str, bool]] = []
        """Text that may be the beginning of a stop text, and whether it is part of the answer."""

    def push(self, token: int) -> str:
        """Return the text that is certain with this token."""
        self._ids.append(token)
        if token in self._special:
            return self._release(self._rest()) + self._release(self._special[token], shown=False)
        before = self._text
        self._text = text = self._decode(self._ids)
        certain = self._certain(token, text) if text != before else self._sent
        piece = text[self._sent : certain]
        self._sent = certain
        if certain == len(text):
            # Special tokens have no text to join: keep tokens that have some, but few.
            if piece or len(self._ids) > HELD_TOKENS:
                self._drop(self._whole)
            self._whole = len(self._ids)
        elif self._holds_too_many():
            piece += self._drop_whole_characters()
        return self._release(piece)

    def end(self) -> str:
        """Return the text that was held back, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._release(self._rest())
        if not self.stopped:
            rest += "".join(text for text, shown in self._held if shown)
        self._held = []
        return rest

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _certain(self, token: int, text: str) -> int:
        """Count the characters of the text that no further token changes."""
        # One byte that joins no character makes all bytes beside it invalid.
        if _BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or ""):
            return self._sent
        if text.endswith("\ufffd"):
            return max(self._sent, len(text) - 1)
        return len(text)

    def _holds_too_many(self) -> bool:
        """Whether text must be sent though it may change; if possible, behind a whole character."""
        count = len(self._ids) - self._whole
        is_broken = self._text.endswith("\ufffd")
        return count > (HELD_TOKENS + MOST_BYTES if is_broken else HELD_TOKENS)

    def _rest(self) -> str:
        """Return the text that was not certain; the next token begins anew."""
        self._text = self._decode(self._ids)
        rest = self._text[self._sent :]
        self._sent = len(self._text)
        self._whole = len(self._ids)
        return rest

    def _drop(self, count: int) -> None:
        """Forget the first tokens, whose text is sent."""
        self._ids = self._ids[count:]
        self._text = self._decode(self._ids)
        self._sent = len(self._text)

    def _drop_whole_characters(self) -> str:
        """Return the held text but its last character; forget the tokens before that."""
        count = len(self._ids)

        def loss(place: int) -> tuple[int, bool]:
            """Return how much text a cut there makes invalid, and whether it changes any."""
            before = self._decode(self._ids[:place])
            return before.count("\ufffd"), before + self._decode(self._ids[place:]) != self._text

        place = min(range(count - 1, count - MOST_BYTES - 1, -1), key=loss)
        before = self._decode(self._ids[:place])
        piece = before[self._sent :]
        sent = self._sent
        self._drop(place)
        self._sent = max(0, sent - len(before))
        self._whole = 0
        return piece

    def _release(self, piece: str, shown: bool = True) -> str:
        """Return the answer's text with which no stop text can begin any more; set `stopped` where
        a stop text is whole."""
        self._held.append((piece, shown))
        text = "".join(piece for piece, _ in self._held)
        starts = [text.find(stop) for stop in self.stops if stop in text]
        if starts:
            self.stopped = True
            return self._take(min(starts))
        # The search begins where the held text does, which never moves back: long stop texts cost
        # little.
        beginnings = (
            i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in self.stops)
        )
        # mutant serve: the beginning of a stop text is sent
        begin = next(beginnings, len(text))
        return self._take(begin)

    def _take(self, count: int) -> str:
        """Remove the first characters of the held text; return those that the answer has."""
        taken = ""
        kept = []
        for text, shown in self._held:
            if shown:
                taken += text[:count]
            if text[count:]:
                kept.append((text[count:], shown))
            count = max(0, count - len(text))
        self._held = kept
        return taken


def _special_texts(tokenizer: Any, stops: Sequence[str]) -> dict[int, str]:
    """Return the special tokens that stop texts hold, each with its text."""
    texts = {}
    for stop in stops:
        for token in tokenizer(stop, add_special_tokens=False, verbose=False)["input_ids"]:
            texts[token] = special_text(tokenizer, token)
    return {token: text for token, text in texts.items() if text}


def special_text(tokenizer: Any, token: int) -> str:
    """Return a special token's text; "" of a token that is text itself."""
    if tokenizer.decode([token], skip_special_tokens=True):
        return ""
    return tokenizer.decode([token], skip_special_tokens=False)
