"""Convert text to tokens, and tokens to text as they come: whole characters, and no stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HELD_TOKENS = 8
"""Newest tokens that may be an unfinished character; more than any character has."""


def token_numbers(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Return the token numbers of a prompt's text.

    Args:
        chat: Whether the text is a chat's. A chat template writes special tokens itself, so the
            tokenizer must not add them (a beginning of text) again.
    """
    templated = chat and bool(getattr(tokenizer, "chat_template", None))
    return tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"]


class TextStream:
    """Convert tokens to pieces of text.

    Args:
        tokenizer: A Hugging Face tokenizer.
        stops: Texts that end the answer; neither they nor the text behind them is part of it.
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
        self._ids: list[int] = list(prompt[-HELD_TOKENS:])
        self._done = len(self._ids)  # tokens that are text already
        self._context = 0  # the first of them that is decoded again, to join the next ones
        self._held = ""  # may be the beginning of a stop text
        # Half a character in the prompt would make the answer's text shorter.
        if self._decode(self._done).endswith("\ufffd"):
            self._context = self._done

    def push(self, token: int) -> str:
        """Return the text that is certain with this token."""
        self._ids.append(token)
        before = self._decode(self._done)
        now = self._decode(len(self._ids))
        if now.endswith("\ufffd") and len(self._ids) - self._done < HELD_TOKENS:
            return ""
        # Special tokens have no text to join: keep the context that has, but bound it.
        if now != before or len(self._ids) - self._context > 4 * HELD_TOKENS:
            self._context = self._done
        self._done = len(self._ids)
        return self._release(now[len(before) :])

    def end(self) -> str:
        """Return the text that was held back, when no more tokens come."""
        if self.stopped:
            return ""
        before = self._decode(self._done)
        now = self._decode(len(self._ids))
        rest = self._release(now[len(before) :]) + self._held
        self._held = ""
        return rest

    def _decode(self, end: int) -> str:
        return self.tokenizer.decode(
            self._ids[self._context : end],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def _release(self, piece: str) -> str:
        """Return the text with which no stop text can begin any more; set `stopped` where a stop
        text is whole."""
        text = self._held + piece
        starts = [text.find(stop) for stop in self.stops if stop in text]
        if starts:
            self.stopped = True
            self._held = ""
            return text[: min(starts)]
        # The search begins where the held text does, which never moves back: long stop texts cost
        # little.
        beginnings = (
            i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in self.stops)
        )
        # mutant serve: the beginning of a stop text is sent
        begin = next(beginnings, len(text))
        self._held = text[begin:]
        return text[:begin]
