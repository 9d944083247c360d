"""Convert text to tokens, and tokens to text as they come: whole characters, and no stop text."""

import re
from collections.abc import Sequence
from typing import Any

HELD_TOKENS = 64
"""Most tokens whose text is held back because it may still change; of more it is sent as it is."""
MOST_BYTES = 4
"""Bytes of a character in UTF-8, at most."""
BROKEN = "\ufffd"
"""Tokenizers decode bytes to it that are no whole character, or not yet."""
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Name of a token that is one byte, in tokenizers that spell unknown characters in bytes."""


def token_numbers(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Return the token numbers of a prompt's text.

    Args:
        chat: Whether the text is a chat's. A chat template writes special tokens itself, such as
            the beginning of text, so the tokenizer must not add them again.
    """
    templated = chat and bool(getattr(tokenizer, "chat_template", None))
    return tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"]


class TextStream:
    """Convert tokens to pieces of text, which add up to the text of all tokens.

    A character may take several tokens, so text is certain only once no further token changes it.
    Certain text is sent, unless a stop text may begin in it.

    Args:
        tokenizer: A Hugging Face tokenizer.
        stops: Texts that end the answer; neither they nor the text after them is part of it. They
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
        self._ids: list[int] = list(prompt[-HELD_TOKENS:])  # the newest tokens, decoded together
        # Half a character in the prompt would make the answer's text shorter.
        if self._decode(self._ids).endswith(BROKEN):
            self._ids = []
        self._text = self._decode(self._ids)
        self._num_certain_tokens = len(self._ids)  # first ones, whose text is certain
        self._num_certain_chars = len(self._text)  # first ones of `_text`
        self._held: list[tuple[str, bool]] = []
        """(certain text in which a stop text may begin, whether it is part of the answer)."""

    def push(self, token: int) -> str:
        """Return the text that is sent with this token."""
        self._ids.append(token)
        if token in self._special:  # no text of the answer, but perhaps of a stop text
            return self._release(self._rest()) + self._release(self._special[token], shown=False)
        before = self._text
        self._text = text = self._decode(self._ids)
        certain = self._count_certain(token, text) if text != before else self._num_certain_chars
        piece = text[self._num_certain_chars : certain]
        self._num_certain_chars = certain
        if certain == len(text):
            # Tokens before this piece are dropped: it is enough to decode the next ones behind it.
            # A token without text, such as a special one, is not.
            if piece or len(self._ids) > HELD_TOKENS:
                self._drop(self._num_certain_tokens)
            self._num_certain_tokens = len(self._ids)
        elif self._holds_too_many():
            piece += self._drop_whole_characters()
        return self._release(piece)

    def end(self) -> str:
        """Return the text that was held back; no more tokens come."""
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

    def _count_certain(self, token: int, text: str) -> int:
        """Count the characters of the text that no further token changes."""
        # A next byte that joins no character would make all bytes beside it invalid.
        if _BYTE.fullmatch(self.tokenizer.convert_ids_to_tokens(token) or ""):
            return self._num_certain_chars
        if text.endswith(BROKEN):
            return max(self._num_certain_chars, len(text) - 1)
        return len(text)

    def _holds_too_many(self) -> bool:
        """Whether text must be sent though it may change; a broken character gets a few tokens
        more."""
        count = len(self._ids) - self._num_certain_tokens
        is_broken = self._text.endswith(BROKEN)
        return count > (HELD_TOKENS + MOST_BYTES if is_broken else HELD_TOKENS)

    def _rest(self) -> str:
        """Return the text that was not certain, as if it were: no later token joins it."""
        self._text = self._decode(self._ids)
        rest = self._text[self._num_certain_chars :]
        self._num_certain_chars = len(self._text)
        self._num_certain_tokens = len(self._ids)
        return rest

    def _drop(self, count: int) -> None:
        """Drop the first tokens, whose text is sent."""
        self._ids = self._ids[count:]
        self._text = self._decode(self._ids)
        self._num_certain_chars = len(self._text)

    def _drop_whole_characters(self) -> str:
        """Return the text that is not certain, but for its last character; drop the tokens before
        that."""
        count = len(self._ids)

        def loss(place: int) -> tuple[int, bool]:
            """Return (broken characters before a cut there, whether the cut changes the text)."""
            before = self._decode(self._ids[:place])
            return before.count(BROKEN), before + self._decode(self._ids[place:]) != self._text

        place = min(range(count - 1, count - MOST_BYTES - 1, -1), key=loss)
        before = self._decode(self._ids[:place])
        piece = before[self._num_certain_chars :]
        num_certain = self._num_certain_chars
        self._drop(place)
        self._num_certain_chars = max(0, num_certain - len(before))
        self._num_certain_tokens = 0
        return piece

    def _release(self, piece: str, shown: bool = True) -> str:
        """Hold a piece of certain text, `shown` if it is part of the answer. Return the answer's
        text in which no stop text can begin any more; set `stopped` if a stop text is complete."""
        self._held.append((piece, shown))
        text = "".join(piece for piece, _ in self._held)
        starts = [text.find(stop) for stop in self.stops if stop in text]
        if starts:
            self.stopped = True
            return self._take(min(starts))
        # Only held text is searched, never released text again: long stop texts cost little.
        beginnings = (
            i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in self.stops)
        )
        # mutant serve: the beginning of a stop text is sent
        begin = next(beginnings, len(text))
        return self._take(begin)

    def _take(self, count: int) -> str:
        """Remove the first `count` characters of the held text; return those that are shown."""
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
