"""Read a model's attention sizes from its Hugging Face config."""

from __future__ import annotations

from typing import Any, NamedTuple


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
