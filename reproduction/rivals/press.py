"""Ask about contexts that kvpress compresses: full attention reads a context once for all presses,
and their caches answer together.

Runs in an environment of its own, for kvpress 0.5.5 needs transformers below 5.3 and this package
5.17 or later: pip install kvpress==0.5.5, then pip install --no-deps corecontext.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import kvpress
import torch
from kvpress.presses import kvzip_press
from kvpress.presses.scorer_press import ScorerPress
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, DynamicCache

from corecontext.integrations.hf.cache_name import OLD_NAME, given_cache, with_cache
from corecontext.loading import Loaded
from reproduction.rivals.tasks import FAILURES, Answer, Cell, Item

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
}
"""How each press is made, from the share of the entries that it removes; its other settings are
those of kvpress."""


class Compressed(NamedTuple):
    """A context's entries."""

    cache: DynamicCache
    visible: list[Tensor]
    """Entries of each layer that attention sees [S, Hkv], bool. AdaKV and KVzip hide entries and
    leave them in the cache."""

    def sizes(self, num_visible: int) -> dict[str, int]:
        """Return the bytes of the cache, and of those of its entries that attention sees."""
        layers = self.cache.layers
        entry = layers[0].keys[0, 0, 0].nbytes + layers[0].values[0, 0, 0].nbytes
        device_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        return {
            "device_bytes": device_bytes,
            "kept_bytes": entry * num_visible,
            "host_bytes": 0,
        }


class PressRun:
    """A model whose contexts presses compress after full attention has read them.

    Args:
        loaded: The model under full attention.
        cells: Keys of PRESSES, or "full" for none, and their compressions: entries of the context
            for each that stays.
    """

    def __init__(self, loaded: Loaded, cells: Sequence[Cell]) -> None:
        self.cells = tuple(cells)
        self.model = loaded.model
        self.pipeline = kvpress.KVPressTextGenerationPipeline(
            model=loaded.model, tokenizer=loaded.tokenizer
        )
        # KVzip loads the tokenizer for each context.
        kvzip_press.AutoTokenizer = _LoadedOnce
        self.presses = {cell: _new_press(cell) for cell in cells if cell.method != "full"}
        _share_scores(self.presses.values())

    def sizes(self, cell: Cell, length: int) -> dict[str, int]:
        """Return no sizes: a press has none of a record's params."""
        return {}

    def ask(self, item: Item) -> dict[Cell, Answer | Exception]:
        """Return the answers from compressed contexts, or how presses failed."""
        contexts, logits = self.read(item)
        read = {cell: c for cell, c in contexts.items() if isinstance(c, Compressed)}
        answers = item.answers(logits, _sizes(list(read.values())))
        return contexts | dict(zip(read, answers))

    def read(self, item: Item) -> tuple[dict[Cell, Compressed | Exception], Tensor]:
        """Compress a context, and return the logits of the answer's tokens [C, n, vocabulary] in
        the C contexts of presses that did not fail."""
        tokens = torch.tensor([item.ids[:-1]], device=self.model.device)
        with torch.inference_mode():
            contexts = self._compress(tokens[:, : item.question])
            read = [context for context in contexts.values() if isinstance(context, Compressed)]
            return contexts, self._answer(read, tokens[:, item.question :], item)

    def first_token(self, cell: Cell, item: Item) -> dict[str, int]:
        """Answer with one token in kvpress's own pipeline, and return the bytes of the cache."""
        tokens = torch.tensor([item.ids[: item.answer]])
        inputs = {
            "context_ids": tokens[:, : item.question],
            "questions_ids": [tokens[:, item.question :]],
        }
        cache = DynamicCache()
        press = None if cell.method == "full" else _new_press(cell)
        with torch.inference_mode():
            self.pipeline._forward(inputs, 1, press, cache)
        return _sizes([Compressed(cache, self._visible(cache))])[0]

    def _compress(self, ids: Tensor) -> dict[Cell, Compressed | Exception]:
        """Read a context [1, L] and compress it."""
        contexts: dict[Cell, Any] = {cell: Compressed(DynamicCache(), []) for cell in self.cells}
        shared = DynamicCache()
        with ExitStack() as hooks:
            for cell, press in self.presses.items():
                if cell.method != "kvzip":
                    press.forward_hook = functools.partial(_compress_copy, contexts, cell, press)
                    hooks.enter_context(press(self.model))
            self.model.model(input_ids=ids, **with_cache(shared))
        for cell in self.cells:
            if cell.method == "full":
                contexts[cell] = Compressed(shared, self._visible(shared))
        zipped = [cell for cell in self.cells if cell.method == "kvzip"]
        if zipped:
            try:
                contexts |= self._zip(ids, zipped)
            except FAILURES as error:
                contexts |= dict.fromkeys(zipped, error)
        return contexts

    def _zip(self, ids: Tensor, cells: Sequence[Cell]) -> dict[Cell, Compressed]:
        """Compress a context by KVzip, whose second reading of it serves all compressions."""
        contexts = {}
        cache = DynamicCache()
        press = self.presses[cells[0]]

        def hide(model: Any) -> None:
            for cell in cells:
                press.compression_ratio = 1 - 1 / cell.compression
                kvpress.KVzipPress.compress_post(press, model)
                contexts[cell] = Compressed(cache, self._visible(cache))

        press.compress_post = hide
        with press(self.model):
            self.model.model(input_ids=ids, **with_cache(cache))
        return contexts

    def _visible(self, cache: DynamicCache) -> list[Tensor]:
        """Return the entries of each layer that no press has hidden [S, Hkv]."""
        modules = (block.self_attn for block in self.model.model.layers)
        return [_pop_visible(module, layer) for module, layer in zip(modules, cache.layers)]

    def _answer(self, contexts: Sequence[Compressed], ids: Tensor, item: Item) -> Tensor:
        """Return the logits of the answer's tokens [C, n, vocabulary] in C contexts, given the
        tokens of the question and the answer [1, T]."""
        cache = DynamicCache()
        visible = []
        for i in range(len(self.model.model.layers)):
            layers = [context.cache.layers[i] for context in contexts]
            keys = _pad([layer.keys[0].transpose(0, 1) for layer in layers])
            values = _pad([layer.values[0].transpose(0, 1) for layer in layers])
            cache.update(keys.transpose(1, 2), values.transpose(1, 2), i)
            visible.append(_pad([context.visible[i] for context in contexts]).transpose(1, 2))
        mask_layer = functools.partial(_mask_layer, visible)
        positions = torch.arange(item.question, len(item.ids) - 1, device=ids.device)[None]
        with ExitStack() as hooks:
            for block in self.model.model.layers:
                hook = block.self_attn.register_forward_pre_hook(mask_layer, with_kwargs=True)
                hooks.callback(hook.remove)
            output = self.model(
                input_ids=ids.expand(len(contexts), -1),
                **with_cache(cache),
                position_ids=positions,
                logits_to_keep=len(item.ids) - item.answer,
            )
        return output.logits


def _sizes(contexts: Sequence[Compressed]) -> list[dict[str, int]]:
    """Return the bytes of compressed contexts."""
    counts = [torch.cat([rows.flatten() for rows in context.visible]).sum() for context in contexts]
    return [context.sizes(n) for context, n in zip(contexts, torch.stack(counts).tolist())]


def _new_press(cell: Cell) -> Any:
    """Return the press of a method and a compression."""
    return PRESSES[cell.method](1 - 1 / cell.compression)


def _share_scores(presses: Iterable[Any]) -> None:
    """Let presses whose scores are the same function of a layer compute them once."""
    functions: dict[Any, Any] = {}
    for press in presses:
        scorer = getattr(press, "press", press)  # AdaKV has a press of its own
        # The scores of StreamingLLM depend on the ratio.
        if isinstance(scorer, ScorerPress) and not isinstance(scorer, kvpress.StreamingLLMPress):
            score = type(scorer).score
            scorer.score = functions.setdefault(score, _Scores(scorer.score))


class _Scores:
    """Scores of the last layer that presses asked for."""

    def __init__(self, score: Callable[..., Tensor]) -> None:
        self.score = score
        self.layer = None
        self.scores = None

    def __call__(self, module: Any, hidden_states: Tensor, *args: Any) -> Tensor:
        if self.layer is not hidden_states:
            self.scores = self.score(module, hidden_states, *args)
            self.layer = hidden_states
        return self.scores.clone()  # AdaKV writes into them


class _LoadedOnce:
    """AutoTokenizer that remembers."""

    from_pretrained = staticmethod(functools.cache(AutoTokenizer.from_pretrained))


def _compress_copy(
    contexts: dict[Cell, Any], cell: Cell, press: Any, module: Any, *call: Any
) -> None:
    """Compress a layer's entries for one press, and leave them to the next as they are.

    Args:
        call: Arguments, keyword arguments and output of the layer.
    """
    context = contexts[cell]
    if not isinstance(context, Compressed):
        return
    args, kwargs, output = call
    layer = copy.copy(given_cache(kwargs).layers[module.layer_idx])
    context.cache.layers.append(layer)
    try:
        # A press compares its position with the length: on the CPU, without waiting for the device.
        position = torch.tensor([layer.keys.shape[2] - 1])
        arguments = {**kwargs, OLD_NAME: context.cache, "cache_position": position}
        type(press).forward_hook(press, module, args, arguments, output)
    except FAILURES as error:
        contexts[cell] = error
    context.visible.append(_pop_visible(module, layer))


def _pop_visible(module: Any, layer: Any) -> Tensor:
    """Return the entries of a layer that its press has not hidden [S, Hkv], and hide none."""
    hidden = getattr(module, "masked_key_indices", None)
    module.masked_key_indices = None
    shape = layer.keys.shape[1:3]
    if hidden is None:
        return layer.keys.new_ones(shape, dtype=torch.bool).T
    _, heads, entries = hidden
    visible = torch.ones(shape, dtype=torch.bool, device=heads.device)
    visible[heads, entries] = False
    return visible.to(layer.keys.device).T


def _pad(rows: Sequence[Tensor]) -> Tensor:
    """Stack tensors of different lengths, with zeros behind the shorter ones."""
    return pad_sequence(rows, batch_first=True)


def _mask_layer(
    visible: Sequence[Tensor], module: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Give a layer the mask of its own entries: those that are seen, and the causal mask of the
    question and the answer."""
    count = kwargs["hidden_states"].shape[1]
    seen = visible[module.layer_idx].repeat_interleave(module.num_key_value_groups, 1)
    later = seen.new_ones(count, count).tril().expand(*seen.shape[:2], -1, -1)
    mask = torch.cat((seen[:, :, None].expand(-1, -1, count, -1), later), -1)
    return args, {**kwargs, "attention_mask": mask}
