"""Write the log-probabilities of an answer in the OpenAI protocol's form."""

import codecs
from collections import deque
from typing import Any

from corecontext.serve.request import TokenLogprobs
from corecontext.serve.token_text import TokenText


class LogprobsWriter:
    """Write the log-probabilities of one choice, as far as its text has come.

    Args:
        texts: Gives the text of each token.
        chat: Whether the choice answers a chat.
        start: Characters of the answer's text before the first token. Where the prompt is echoed
            its tokens come first: the prompt's length less that of its tokens' text, which may be
            longer: then it is below 0.
    """

    def __init__(self, texts: TokenText, chat: bool, start: int) -> None:
        self.texts = texts
        self.chat = chat
        self.offset = start
        """Character of the text at which the next token begins."""
        # Joins the bytes of characters that are split over several tokens.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: deque[TokenLogprobs] = deque()

    def write(self, records: list[TokenLogprobs], end: float) -> dict[str, Any] | None:
        """Write the tokens that begin in the text so far; later ones wait.

        Args:
            records: The next tokens; the list is emptied.
            end: Characters of the text so far; infinity writes all tokens.

        Returns:
            The protocol's `logprobs`; None if no token is written.
        """
        self._pending += records
        records.clear()
        written = []
        offsets = []
        while self._pending and self.offset < end:
            record = self._pending.popleft()
            written.append(record)
            offsets.append(max(0, self.offset))
            # A special token shows no text.
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
        """Return a token's text; that of bytes is marked, as OpenAI does."""
        text, raw = self.texts.text(token)
        if text.encode() != raw:
            return f"bytes:{text}"
        return text

    def _top(self, record: TokenLogprobs) -> dict[str, float] | None:
        """Return the log-probabilities of the likeliest tokens and of the token itself, by their
        texts; of two tokens with the same text, that of the likelier."""
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
