"""Read a model's attention sizes from its Hugging Face config."""

from __future__ import annotations

from typing import Any, NamedTuple

from corecontext.files import UserError

COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Fields of a config that must be at least 1."""


class ModelSizes(NamedTuple):
    """Sizes of a decoder's attention, by the names that records use."""

    query_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    """All decoder layers, those with a sliding window included."""

    @classmethod
    def of(cls, config: Any) -> ModelSizes:
        """Read the sizes of the text decoder of any Hugging Face config.

        Some families leave out `num_key_value_heads` (as many as query heads) or `head_dim` (the
        hidden size divided among the query heads).
        """
        text = config.get_text_config(decoder=True)
        query_heads = text.num_attention_heads
        return cls(
            query_heads,
            getattr(text, "num_key_value_heads", None) or query_heads,
            getattr(text, "head_dim", None) or text.hidden_size // query_heads,
            text.num_hidden_layers,
        )


def check_counts(name: str, text_config: Any) -> None:
    """Raise a UserError for sizes that no model has, from which transformers would fail later with
    an obscure error; `name` is the model's."""
    counts = {key: getattr(text_config, key, None) for key in COUNTS}
    for key, value in counts.items():
        if isinstance(value, int) and value < 1:
            raise UserError(
                f"model '{name}' must have a {key} of at least 1 in its config.json, got {value}."
            )
    heads = counts["num_attention_heads"]
    kv_heads = counts["num_key_value_heads"]
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise UserError(
            f"model '{name}' must have a multiple of its {kv_heads} KV heads as query heads in its "
            f"config.json, got {heads}."
        )
