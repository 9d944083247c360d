"""Compare a model and its tokenizer with the GGUF file that transformers has read them from."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from corecontext.integrations.hf.gguf_config import GGUF, rotations_of

SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Fields of a file, after the architecture that begins their names, and a Hugging Face config's."""
NORMS = {
    "output_norm": "norm",
    "blk.0.attn_norm": "layers.0.input_layernorm",
    "blk.0.attn_q_norm": "layers.0.self_attn.q_norm",
    "blk.0.attn_k_norm": "layers.0.self_attn.k_norm",
}
"""Tensors of norms in a file, and the modules of a base model that have them."""
WORDS = "the and of a to in that it is was for on with as his he be at by had not are but from"
"""Words that every tokenizer splits by its own merges."""
SAMPLE = 300
"""Most words of the vocabulary that are split."""
NORMAL = 1
"""The `tokenizer.ggml.token_type` of a token of text."""
UPDATE = "Install a newer transformers: pip install -U transformers"


def check_model(file: GGUF, model: Any) -> None:
    """Raise ValueError where a model has other sizes, rotations or norms than its file."""
    config = model.config.get_text_config(decoder=True)
    for name, attribute in SIZES.items():
        value = file.own(name)
        read = getattr(config, attribute, None)
        if isinstance(value, (int, float)) and read is not None:
            _check_equal(name, value, read)
    rotations = rotations_of(config)
    full = rotations.get("full_attention", rotations.get(""))
    sliding = rotations.get("sliding_attention")
    for name, rotation in (("rope.freq_base", full), ("rope.freq_base_swa", sliding)):
        if rotation and file.own(name) is not None:
            _check_equal(name, file.own(name), rotation["rope_theta"])
    _check_norms(file, model)


def _check_equal(name: str, value: float, read: float) -> None:
    if not math.isclose(value, read, rel_tol=1e-5):
        raise ValueError(f"its {name} is {value}, but transformers reads {read}. {UPDATE}")


def _check_norms(file: GGUF, model: Any) -> None:
    """Compare RMS norms by what they return: some families add 1 to the weights that they store."""
    modules = dict(model.base_model.named_modules())
    for name, path in NORMS.items():
        weight = file.values(f"{name}.weight")
        module = modules.get(path)
        if weight is None or module is None:
            continue
        x = torch.linspace(-2, 3, len(weight))
        with torch.no_grad():
            dtype = module.weight.dtype
            y = module(x.to(dtype)).float()
        expected = x / x.square().mean().sqrt() * weight
        # bfloat16 rounds by less than 1 %; a 1 that is added or missing changes far more.
        if not torch.allclose(y, expected, rtol=0.03, atol=0.03 * float(expected.abs().max())):
            raise ValueError(f"its tensor {name}.weight is read with other numbers. {UPDATE}")


class Vocabulary(NamedTuple):
    """A file's tokens, and how they merge (byte pair encoding)."""

    numbers: dict[str, int]
    """Number of each token."""
    ranks: dict[tuple[str, str], float]
    """Rank of each pair of pieces that merges; the least merges first."""
    space: str
    """The character that stands for a space."""

    @classmethod
    def of(cls, file: GGUF) -> Vocabulary | None:
        """Read it; None for a kind of tokenizer that does not merge pieces."""
        tokens = file.get("tokenizer.ggml.tokens") or []
        numbers = {token: number for number, token in enumerate(tokens)}
        kind = file.get("tokenizer.ggml.model")
        if kind == "gpt2":
            merges = file.get("tokenizer.ggml.merges") or []
            pairs = [tuple(merge.split(" ", 1)) for merge in merges]
            return cls(numbers, {pair: rank for rank, pair in enumerate(pairs)}, "Ġ")
        scores = file.get("tokenizer.ggml.scores")
        if kind not in ("llama", "gemma") or scores is None:
            return None
        return cls(numbers, _Scored(numbers, scores), "▁")

    def split(self, word: str) -> list[int]:
        """Return the tokens of a word of letters and the space before it."""
        pieces = list(self.space + word)
        while True:
            pairs = list(itertools.pairwise(pieces))
            ranks = [self.ranks.get(pair, math.inf) for pair in pairs]
            best = min(ranks, default=math.inf)
            if best == math.inf:
                return [self.numbers[piece] for piece in pieces]
            place = ranks.index(best)
            pieces[place : place + 2] = ["".join(pairs[place])]


class _Scored(dict):
    """Ranks of merges without a list of them: by the score of the token that a pair makes."""

    def __init__(self, numbers: dict[str, int], scores: Sequence[float]) -> None:
        super().__init__()
        self.numbers = numbers
        self.scores = scores

    def get(self, pair: tuple[str, str], default: float) -> float:  # type: ignore[override]
        """Return the rank of a pair."""
        number = self.numbers.get("".join(pair))
        return default if number is None else -self.scores[number]


def check_tokenizer(file: GGUF, tokenizer: Any) -> None:
    """Raise ValueError where a tokenizer has other tokens than its file, or splits words otherwise
    than the file's merges or scores."""
    tokens = file.get("tokenizer.ggml.tokens") or []
    kinds = file.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    read_tokens = tokenizer.convert_ids_to_tokens(range(len(tokens)))
    for number, (token, kind, read) in enumerate(zip(tokens, kinds, read_tokens, strict=True)):
        if kind == NORMAL and read != token:
            raise ValueError(
                f"its token {number} is {token!r}, but transformers reads {read!r}. {UPDATE}"
            )
    vocabulary = Vocabulary.of(file)
    if vocabulary is None:
        return
    words = [
        word for word in _words(vocabulary) if all(letter in vocabulary.numbers for letter in word)
    ]
    # Compare what follows the first word: that may lose its space, or have a begin token before it.
    ids = tokenizer(" ".join(["a", *words]))["input_ids"]
    expected = [token for word in words for token in vocabulary.split(word)]
    if ids[len(ids) - len(expected) :] != expected:
        raise ValueError(f"its tokenizer splits words otherwise than transformers. {UPDATE}")


def _words(vocabulary: Vocabulary) -> Iterator[str]:
    """Yield common words, and words from all of the vocabulary, evenly spaced."""
    yield from WORDS.split()
    pattern = re.compile(f"{vocabulary.space}([a-z]+)")
    words = [match[1] for match in map(pattern.fullmatch, vocabulary.numbers) if match]
    yield from words[:: max(1, len(words) // SAMPLE)]
