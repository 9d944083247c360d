"""How each method runs a whole model: its prompt, then its steps, as its users would.

Full attention reads the prompt in one pass, by the kernel that PyTorch is asked for, and decodes
with transformers' growing cache, or with its static cache in a CUDA graph, or from rows of this
package with the kernel that also decodes for CCA: transformers' static cache repeats the keys and
values of grouped heads before every step. CCA runs in `corecontext.inference.Engine`. StreamingLLM
reads the prompt in chunks and decodes with its own cache.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache

from benchmarks.methods import KERNELS
from benchmarks.shapes import make_prompt
from corecontext.cache.full import FullLayer
from corecontext.config import CCAConfig
from corecontext.heads.budget import Shape, Unit, at_equal_cache, raw_heads
from corecontext.inference import Engine, prefill
from corecontext.integrations.hf_cache import GivenLayer
from corecontext.measure import capture
from corecontext.model_sizes import ModelSizes

FULL = ("full", *KERNELS)
ROWS = "full_rows"  # decodes only
RAW = "cca_raw"
OURS = ("cca", RAW)
METHODS = (*FULL, ROWS, "streaming_llm", *OURS)
DECODERS = (
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)  # where the kernel asked for takes no mask


def attention(model: Any, method: str, config: CCAConfig) -> contextlib.AbstractContextManager[Any]:
    """The model under a method, for the length of a with block; StreamingLLM has CCA's window and 4
    sinks."""
    if method in FULL:
        return contextlib.nullcontext()
    from corecontext.baselines import StreamingLLM, enabled

    return enabled(
        model, StreamingLLM(window_size=config.window_size) if method == "streaming_llm" else config
    )


def raw_config(shape: Shape, config: CCAConfig, length: int) -> tuple[CCAConfig, int]:
    """As many KV heads as `corecontext layers --raw` chooses keep every token, at the cache size of
    equal groups; and how many. Which they are makes no difference to memory: they are spread over
    all layers evenly.

    Raises:
        ValueError: they do not fit.
    """
    count = raw_heads(shape, config, length)
    units = [
        Unit(*divmod(i * shape.layers * shape.kv_heads // count, shape.kv_heads))
        for i in range(count)
    ]
    return at_equal_cache(shape, units, config, length, raw=True), count


class PlainRun:
    """Full attention or StreamingLLM on transformers' growing cache."""

    def __init__(self, model: Any, method: str, input_ids: torch.Tensor) -> None:
        self.model, self.method, self.input_ids = model, method, input_ids
        self.cache: Any = None

    def first(self) -> None:
        """Read the prompt and choose a token."""
        whole = self.input_ids.shape[1] if self.method in FULL else None
        with _kernel(self.method, decoding=False):
            logits, self.cache, positions = prefill(self.model, self.input_ids, chunk_size=whole)
        self.token, self.positions = logits.argmax(-1, keepdim=True), positions[:, None]

    @torch.no_grad()
    def step(self) -> None:
        """One more token."""
        with _kernel(self.method, decoding=True):
            out = self.model(
                self.token, past_key_values=self.cache, position_ids=self.positions, use_cache=True
            )
        self.token, self.positions = out.logits[:, -1:].argmax(-1), self.positions + 1

    def close(self) -> None:
        """Let go of the cache."""
        self.cache = None


class StaticRun:
    """Steps of full attention on transformers' static cache, filled with random numbers; on a GPU
    in a CUDA graph."""

    def __init__(self, model: Any, method: str, batch: int, length: int, steps: int) -> None:

        self.model, self.method = model, method
        self.cache: Any = self._filled(batch, length, length + steps)
        self.token = make_prompt(model, batch, 1)
        self.positions = torch.full((batch, 1), length, device=model.device)
        self.step: Any = capture(self._step) if model.device.type == "cuda" else self._step

    def _filled(self, batch: int, length: int, room: int) -> Any:
        from transformers import StaticCache

        cache = StaticCache(self.model.config, max_cache_len=room)
        layers: Any = cache.layers
        for layer in layers:
            one = _one_token(self.model, batch)
            layer.lazy_initialization(one, one)
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(length)
        return cache

    @torch.no_grad()
    def _step(self) -> None:
        with _kernel(self.method, decoding=True):
            out = self.model(
                self.token, past_key_values=self.cache, position_ids=self.positions, use_cache=True
            )
        self.token.copy_(out.logits[:, -1:].argmax(-1))
        self.positions.add_(1)

    def close(self) -> None:
        """Let go of the cache and the graph."""
        self.cache = self.step = None


class RowsRun(StaticRun):
    """The same from rows of this package, as `corecontext serve --method full` keeps them.

    The model is under CCA, whose place the rows take.
    """

    def _filled(self, batch: int, length: int, room: int) -> Any:
        layers: list[Any] = []
        for _ in range(ModelSizes.of(self.model.config).layers):
            layer = FullLayer(room, fixed=True)
            one = _one_token(self.model, batch)
            layer.hold(
                [one.new_empty(*one.shape[:2], room, one.shape[3]).normal_() for _ in range(2)]
            )
            layer.pad, layer.pads = (
                torch.zeros(batch, dtype=torch.long, device=one.device),
                [0] * batch,
            )
            layer.seen = torch.full((), length, device=one.device)
            layers.append(GivenLayer(layer))
        return Cache(layers=layers)


def _one_token(model: Any, batch: int) -> torch.Tensor:
    """Keys of one token, [B, Hkv, 1, D], as one layer makes them."""
    sizes = ModelSizes.of(model.config)
    shape = (batch, sizes.kv_heads, 1, sizes.head_dim)
    return torch.zeros(shape, dtype=model.dtype, device=model.device)


class CompactRun:
    """CCA as `Engine` runs it."""

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        steps: int,
        *,
        fuse: str | None = None,
        chunk_size: int | None = None,
    ) -> None:
        engine = Engine(model, keep=0, fuse=fuse, chunk_size=chunk_size)
        self.stream = engine.stream(input_ids, max_new_tokens=steps)

    def first(self) -> None:
        """Read the prompt and choose a token."""
        next(self.stream)

    step = first

    @property
    def cache(self) -> Any:
        """Of the running request."""
        assert self.stream.session is not None
        return self.stream.session.cache

    def close(self) -> None:
        """End the request."""
        self.stream.close()


class FilledRun:
    """Steps of CCA on fixed buffers filled with random numbers, as if a prompt of `length` tokens
    had been read."""

    def __init__(
        self,
        model: Any,
        config: CCAConfig,
        batch: int,
        length: int,
        steps: int,
        *,
        fuse: str | None = None,
    ) -> None:
        engine = Engine(model, keep=0, fuse=fuse, static=True)
        session: Any = engine.take((batch, length + steps, config, 1))
        ids = make_prompt(model, batch, 2)
        _, session.cache, positions = prefill(model, ids, cache=session.cache)
        for layer in session.cache.layers:
            for x in layer.compact.buffers:
                x.normal_() if x.is_floating_point() else x.random_(
                    0, 127
                )  # 127 is no number in fp8
            layer.compact.seen.fill_(length)
        session.begin(positions - 2 + length, [0] * batch, length)
        session.tokens.copy_(ids[:, -1:])
        self.session = session

    def step(self) -> None:
        """One more token of each row."""
        self.session.step("greedy")

    @property
    def cache(self) -> Any:
        """Of all rows."""
        return self.session.cache

    def close(self) -> None:
        """Let go of the cache."""
        self.session = None


def _kernel(method: str, decoding: bool) -> contextlib.AbstractContextManager[Any]:
    """PyTorch's attention by the kernel of a method: in a prompt by no other, in a step by others
    where it refuses."""
    if method not in KERNELS:
        return contextlib.nullcontext()
    return (
        sdpa_kernel([KERNELS[method], *DECODERS], set_priority=True)
        if decoding
        else sdpa_kernel(KERNELS[method])
    )
