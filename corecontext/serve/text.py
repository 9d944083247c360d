"""Text to token numbers, and tokens back to text as they come: whole characters only, and nothing
of a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HELD_TOKENS = (
    8  # tokens that may be an unfinished character; longer than any, so what is left is not one
)
SAMPLE = "{role}: {text}\n"


def chat_prompt(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> str:
    """Roles and texts as the model's own chat template has them, else as lines of `role: text`.

    Raises:
        ValueError: the template refuses the messages.
    """
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": role, "content": text} for role, text in messages]
        try:
            return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # written in another language, by others: it may raise anything
            raise ValueError(
                f"messages must suit the model's chat template, which refuses them: {error}"
            ) from None
    return "".join(SAMPLE.format(role=role, text=text) for role, text in messages) + "assistant:"


def token_numbers(tokenizer: Any, text: str, chat: bool) -> list[int]:
    """Token numbers of a prompt, or of what `chat_prompt` made: a chat template writes special
    tokens itself, so the tokenizer must not add them (a second beginning of text) again."""
    templated = chat and bool(getattr(tokenizer, "chat_template", None))
    return tokenizer(text, add_special_tokens=not templated, verbose=False)["input_ids"]


class TextStream:
    """Turns tokens into pieces of text.

    Args:
        tokenizer: Decodes.
        stops: Texts that end the answer; they are not part of it, nor is what follows.
        prompt: Tokens that the answer continues; of a first word some tokenizers drop the space
            before it.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stopped = False
        self._ids: list[int] = list(prompt[-HELD_TOKENS:])
        self._context, self._done = (
            0,
            len(self._ids),
        )  # what is before _done is text already, from _context on it joins
        if self._decode(self._done).endswith(
            "\ufffd"
        ):  # half a character, which would make the answer's text shorter
            self._context = self._done
        self._held = ""  # may be the beginning of a stop text

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        self._ids.append(token)
        before, now = self._decode(self._done), self._decode(len(self._ids))
        if now.endswith("\ufffd") and len(self._ids) - self._done < HELD_TOKENS:
            return ""
        if (
            now != before or len(self._ids) - self._context > 4 * HELD_TOKENS
        ):  # special tokens join with nothing
            self._context = self._done
        self._done = len(self._ids)
        return self._release(now[len(before) :])

    def end(self) -> str:
        """What was held back when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._release(self._decode(len(self._ids))[len(self._decode(self._done)) :])
        rest, self._held = rest + self._held, ""
        return rest

    def _decode(self, end: int) -> str:
        return self.tokenizer.decode(
            self._ids[self._context : end],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def _release(self, piece: str) -> str:
        """What no stop text can begin with any more; sets `stopped` where one is whole."""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(
            (
                length
                for stop in self.stops
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
