"""Ask about contexts that kvpress compresses, in its own pipeline.

Runs in kvpress's environment (corecontext/integrations/kvpress.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvpress
import torch
from torch import Tensor
from transformers import DynamicCache

from corecontext.config import CCAConfig
from corecontext.integrations.kvpress import CCAPress
from corecontext.loading import Loaded
from reproduction.rivals_tasks import Item

SINKS = 16
"""First tokens that CCAPress keeps."""
CHUNK = 16
"""Tokens of a question and its answer that are read at once where a press hides entries: kvpress
searches a key that all queries of a call ignore, and finds none for too many."""


def _cca_press(ratio: float) -> CCAPress:
    """Return a press whose core tokens take half of the entries, the window the other half."""
    config = CCAConfig(round(2 / (1 - ratio)), sink_size=SINKS, core_mass=False)
    return CCAPress(config, compression_ratio=ratio)


PRESSES: dict[str, Callable[[float], Any]] = {
    "streaming_llm": kvpress.StreamingLLMPress,
    "knorm": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "lagkv": kvpress.LagKVPress,
    "tova": kvpress.TOVAPress,
    "snapkv": kvpress.SnapKVPress,
    "pyramidkv": kvpress.PyramidKVPress,
    "expected_attention": kvpress.ExpectedAttentionPress,
    "adakv": lambda ratio: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio)),
    "kvzip": kvpress.KVzipPress,
    "cca_press": _cca_press,
}
"""How each press is made, from the share of the entries that it removes; its other settings are
those of kvpress."""


class PressRun:
    """A model whose contexts a press compresses after full attention has read them.

    Args:
        loaded: The model under full attention.
        name: A key of PRESSES, or "full" for none.
        compression: Entries of the context for each that stays.
    """

    def __init__(self, loaded: Loaded, name: str, compression: int) -> None:
        self.name = name
        self.compression = compression
        self.model = loaded.model
        self.press = None
        if name != "full":
            self.press = PRESSES[name](1 - 1 / compression)
        self.pipeline = GivenAnswers(model=loaded.model, tokenizer=loaded.tokenizer)

    def sizes(self, length: int) -> dict[str, int]:
        """Return the sizes of the press for a context of so many tokens, for a record's params."""
        if not isinstance(self.press, CCAPress):
            return {}
        g, sinks, cores = self.press.sizes(length)
        window = length - sinks - (cores * g)
        return {"group_size": g, "window_size": window, "sink_size": sinks}

    def ask(self, item: Item, *, first: bool = False) -> tuple[Tensor, dict[str, int]]:
        """Return the logits of the answer's tokens [n, vocabulary], and the bytes of the compressed
        context.

        Args:
            first: Only the first token's.
        """
        end = item.answer if first else len(item.ids) - 1
        tokens = torch.tensor([item.ids[:end]])
        cache = DynamicCache()
        inputs = {
            "context_ids": tokens[:, : item.question],
            "questions_ids": [tokens[:, item.question :]],
        }
        count = end - item.answer + 1
        with torch.inference_mode():
            (logits,) = self.pipeline._forward(inputs, count, self.press, cache)
        return logits, self._bytes(cache)

    def _bytes(self, cache: DynamicCache) -> dict[str, int]:
        """Return the bytes of a cache, and of those of its entries that attention sees."""
        device_bytes = 0
        kept = 0
        for layer, block in zip(cache.layers, self.model.model.layers):
            entries = layer.keys[..., 0].numel()
            layer_bytes = layer.keys.nbytes + layer.values.nbytes
            device_bytes += layer_bytes
            kept += layer_bytes * (entries - _num_hidden(block)) // entries
        return {"device_bytes": device_bytes, "kept_bytes": kept, "host_bytes": 0}


class GivenAnswers(kvpress.KVPressTextGenerationPipeline):
    """kvpress's pipeline where questions end with all tokens of a given answer but the last."""

    def generate_answer(
        self, question_ids: Tensor, cache: Any, context_length: int, max_new_tokens: int
    ) -> Tensor:
        """Return the logits of the answer's tokens [max_new_tokens, vocabulary]."""
        end = context_length + question_ids.shape[1]
        positions = torch.arange(context_length, end, device=self.model.device)[None]
        chunk = end
        if any(_num_hidden(block) for block in self.model.model.layers):
            chunk = CHUNK
        hooks = [
            block.self_attn.register_forward_pre_hook(_mask_later_tokens, with_kwargs=True)
            for block in self.model.model.layers
        ]
        try:
            logits = [
                self.model(input_ids=ids, past_key_values=cache, position_ids=places).logits[0]
                for ids, places in zip(question_ids.split(chunk, 1), positions.split(chunk, 1))
            ]
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat(logits)[-max_new_tokens:]


def _num_hidden(block: Any) -> int:
    """Count the entries of a layer that stay in the cache, but that attention ignores."""
    hidden = getattr(block.self_attn, "masked_key_indices", None)
    return 0 if hidden is None else len(hidden[0])


def _mask_later_tokens(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """Give a layer the causal mask of its own number of entries: transformers makes one mask for
    all layers, with which those of fewer entries would see the rest of the answer."""
    count = kwargs["hidden_states"].shape[1]
    entries = kwargs["past_key_values"].layers[module.layer_idx].keys.shape[2]
    mask = kwargs["hidden_states"].new_ones(count, entries + count, dtype=torch.bool)
    return args, {**kwargs, "attention_mask": mask.tril(entries)[None, None]}
