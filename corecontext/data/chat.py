"""Format a chat for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PLAIN = "{role}: {text}\n"
"""A message, for models without a chat template."""


def chat_prompt(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> str:
    """Format a chat by the model's own chat template, else as lines of `role: text`.

    Args:
        messages: (role, text) of each.

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
    return "".join(PLAIN.format(role=role, text=text) for role, text in messages) + "assistant:"
