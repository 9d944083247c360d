"""Find the tokens and the texts that end an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corecontext.data.chat import next_turn, text_after_answer
from corecontext.serve.text import special_text


@dataclass(frozen=True)
class Ends:
    """The ends of a model's answers."""

    tokens: frozenset[int]
    """End every answer: those of generation_config.json, and the tokenizer's end of text."""
    chat_tokens: frozenset[int]
    """End a chat's answer: `tokens`, and the one that the chat template writes after an answer."""
    chat_stops: tuple[str, ...]
    """Texts that end a chat's answer: the next turn's first, of a model without a chat template."""
    added: tuple[str, ...]
    """Texts of those `chat_tokens` that generation_config.json lacks."""

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> Ends:
        """Read the ends off a model and its tokenizer."""
        eos = model.generation_config.eos_token_id
        configured = {eos} if isinstance(eos, int) else set(eos or ())
        tokens = set(configured)
        if getattr(tokenizer, "eos_token_id", None) is not None:
            tokens.add(tokenizer.eos_token_id)
        chat_tokens = tokens | _turn_end(tokenizer)
        added = tuple(tokenizer.decode([token]) for token in sorted(chat_tokens - configured))
        return cls(frozenset(tokens), frozenset(chat_tokens), next_turn(tokenizer), added)


def _turn_end(tokenizer: Any) -> set[int]:
    """Return the special token that a chat template writes directly after an answer, if any."""
    text = text_after_answer(tokenizer).strip()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    return {token for token in ids[:1] if special_text(tokenizer, token)}
