"""Run a whole model by each method: its prompt, then its steps, as users would.

Full attention reads the prompt in one pass by a kernel of PyTorch. It decodes with transformers'
growing cache, with its static cache in a CUDA graph, or from rows of this package with the kernel
that also decodes for CCA: transformers' static cache repeats the keys and values of grouped heads
before every step. CCA runs in `corecontext.inference.Engine`. StreamingLLM reads the prompt in
chunks and decodes with its own cache.
"""

import contextlib
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache

from benchmarks.methods import DECODING, KERNELS
from benchmarks.model_settings import ModelBench
from benchmarks.shapes import make_prompt
from benchmarks.timing import capture
from corecontext.cache.full import FullLayer
from corecontext.config import CCAConfig
from corecontext.inference import Engine, prefill
from corecontext.inference.session import SessionKey
from corecontext.integrations.hf.cache_layers import GivenLayer
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.model_sizes import ModelSizes

FULL = ("full", *KERNELS)
FULL_ROWS = "full_rows"  # decodes only
FETCHING = {
    "fetch": {**DECODING["fetch"], "fetch_share": 16, "store": "device"},
    "fetch_host": {**DECODING["fetch"], "fetch_share": 16, "store": "host"},
}
"""Settings of methods with fetch; neighbouring queries of a prompt share a choice."""
CCA_METHODS = ("cca", *FETCHING)
# Fallbacks of a step: the chosen kernel may refuse its mask.
DECODERS = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def attention(model: Any, method: str, config: CCAConfig) -> contextlib.AbstractContextManager[Any]:
    """Put the model under a method for a with block; StreamingLLM has CCA's window and 4 sinks."""
    if method in FULL:
        return contextlib.nullcontext()
    from corecontext.baselines import StreamingLLM, enabled

    if method == "streaming_llm":
        return enabled(model, StreamingLLM(window_size=config.window_size))
    return enabled(model, config)


def fetching(bench: ModelBench, method: str) -> dict[str, Any]:
    """Return the settings of a method with fetch, none of another."""
    settings = dict(FETCHING.get(method, {}))
    if settings.get("store") == "host" and bench.fetch_slots:
        settings["fetch_slots"] = bench.fetch_slots
    return settings


class PlainRun:
    """Run full attention or StreamingLLM on transformers' growing cache."""

    def __init__(self, model: Any, method: str, input_ids: torch.Tensor) -> None:
        self.model = model
        self.method = method
        self.input_ids = input_ids
        self.cache: Any = None

    def first(self) -> None:
        """Read the prompt and choose a token."""
        whole = self.input_ids.shape[1] if self.method in FULL else None
        with _kernel(self.method, decoding=False):
            logits, self.cache, positions = prefill(self.model, self.input_ids, chunk_size=whole)
        self.token = logits.argmax(-1, keepdim=True)
        self.positions = positions[:, None]

    @torch.no_grad()
    def step(self) -> None:
        """Make one more token."""
        with _kernel(self.method, decoding=True):
            out = self.model(
                self.token, **with_cache(self.cache), position_ids=self.positions, use_cache=True
            )
        self.token = out.logits[:, -1:].argmax(-1)
        self.positions = self.positions + 1

    def close(self) -> None:
        """Release the cache."""
        self.cache = None


class StaticRun:
    """Run steps of full attention on transformers' static cache, filled with random numbers.

    On a GPU a step is captured in a CUDA graph.
    """

    def __init__(self, model: Any, method: str, batch: int, length: int, steps: int) -> None:
        self.model = model
        self.method = method
        self.cache: Any = self._filled(batch, length, length + steps)
        self.token = make_prompt(model, batch, 1)
        self.positions = torch.full((batch, 1), length, device=model.device)
        self.step: Any = capture(self._step) if model.device.type == "cuda" else self._step

    def _filled(self, batch: int, length: int, room: int) -> Any:
        from transformers import StaticCache

        cache = StaticCache(self.model.config, max_cache_len=room)
        layers: Any = cache.layers
        for layer in layers:
            token = _keys_of_token(self.model, batch)
            layer.lazy_initialization(token, token)
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(length)
        return cache

    @torch.no_grad()
    def _step(self) -> None:
        with _kernel(self.method, decoding=True):
            out = self.model(
                self.token, **with_cache(self.cache), position_ids=self.positions, use_cache=True
            )
        self.token.copy_(out.logits[:, -1:].argmax(-1))
        self.positions.add_(1)

    def close(self) -> None:
        """Release the cache and the graph."""
        self.cache = self.step = None


class RowsRun(StaticRun):
    """Run steps of full attention from rows of this package, as `corecontext serve --method full`.

    The model must be under CCA, whose caches the rows replace.
    """

    def _filled(self, batch: int, length: int, room: int) -> Any:
        token = _keys_of_token(self.model, batch)
        layers: list[Any] = []
        for _ in range(self.model.config.get_text_config(decoder=True).num_hidden_layers):
            layer = FullLayer(room, fixed=True)
            shape = (2, *token.shape[:2], room, token.shape[3])
            layer.buffers = list(token.new_empty(shape).normal_())
            layer.pad = torch.zeros(batch, dtype=torch.long, device=token.device)
            layer.pads = [0] * batch
            layer.seen = torch.full((), length, device=token.device)
            layers.append(GivenLayer(layer))
        return Cache(layers=layers)


def _keys_of_token(model: Any, batch: int) -> torch.Tensor:
    """Return keys of one token of one layer, [B, Hkv, 1, D], zero."""
    sizes = ModelSizes.of(model.config)
    shape = (batch, sizes.kv_heads, 1, sizes.head_dim)
    return torch.zeros(shape, dtype=model.dtype, device=model.device)


class CompactRun:
    """Run CCA in `Engine`."""

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

    step = first  # the stream yields a token for either

    @property
    def cache(self) -> Any:
        """The cache of the running request."""
        assert self.stream.session is not None
        return self.stream.session.cache

    def close(self) -> None:
        """End the request."""
        self.stream.close()


class FilledRun:
    """Run steps of CCA on fixed buffers of random numbers, as after a prompt of `length` tokens;
    with fetch, raw tokens and index too."""

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
        # Layers may share host memory, so the Engine's count of it is no limit.
        engine = Engine(model, keep=0, fuse=fuse, static=True, host_bytes_budget=2**50)
        session: Any = engine.take(SessionKey(batch, length + steps, config, 1))
        # A short prompt allocates the buffers, which are then filled as after a long one.
        short = 2
        ids = make_prompt(model, batch, short)
        _, session.cache, positions = prefill(model, ids, cache=session.cache)
        tensors: dict[int, torch.Tensor] = {}  # by address: layers may share host memory
        for layer in session.cache.layers:
            store = layer.compact.store
            more = [] if store is None else [*store.raw, *store.index_buffers]
            tensors |= {x.data_ptr(): x for x in (*layer.compact.buffers, *more)}
            layer.compact.seen.fill_(length)
        for buffer in tensors.values():
            if buffer.is_floating_point():
                buffer.normal_()
            else:
                buffer.random_(0, 127)  # code 127 is NaN in fp8
        session.begin(positions - short + length, [0] * batch, length)
        session.tokens.copy_(ids[:, -1:])
        self.session = session

    def step(self) -> None:
        """Make one more token of each row."""
        self.session.step("greedy")

    @property
    def cache(self) -> Any:
        """The cache of all rows."""
        return self.session.cache

    def close(self) -> None:
        """Release the cache."""
        self.session = None


def _kernel(method: str, decoding: bool) -> contextlib.AbstractContextManager[Any]:
    """Choose PyTorch's attention kernel: the method's alone in a prompt, others too in a step."""
    if method not in KERNELS:
        return contextlib.nullcontext()
    if decoding:
        return sdpa_kernel([KERNELS[method], *DECODERS], set_priority=True)
    return sdpa_kernel(KERNELS[method])
