"""Format a chat for a model."""

from collections.abc import Sequence
from typing import Any

PLAIN = "{role}: {text}\n"
"""A message, for models without a chat template."""
NEXT = "\nuser:"
"""Begins the turn after an answer, for models without a chat template."""
_ANSWER = "answer"
"""Stands for an answer where the template's text behind it is looked for."""


def next_turn(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts that end an answer in a chat: NEXT for a model without a chat template, none
    for others, whose template ends it."""
    return () if getattr(tokenizer, "chat_template", None) else (NEXT,)


def text_after_answer(tokenizer: Any) -> str:
    """Return the text that the model's chat template writes after an answer; "" without one."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # of any kind, as in `chat_prompt`
        return ""
    return text.rpartition(_ANSWER)[2]


def chat_prompt(tokenizer: Any, messages: Sequence[tuple[str, str]]) -> str:
    """Format a chat by the model's own chat template, else as lines of `role: text`.

    Args:
        messages: (role, text) of each, such as ("user", "Hello").

    Raises:
        ValueError: the template refuses the messages.
    """
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": role, "content": text} for role, text in messages]
        try:
            return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program by others, which may raise anything
            raise ValueError(
                f"messages must suit the model's chat template, which refuses them: {error}"
            ) from None
    return "".join(PLAIN.format(role=role, text=text) for role, text in messages) + "assistant:"
