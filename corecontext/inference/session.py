"""Decode one batch: its cache, its buffers and its step, captured in a CUDA graph on a GPU."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from corecontext.cache import parts_of
from corecontext.cache.full import FullLayer
from corecontext.cache.parts import Parts
from corecontext.config import CCAConfig
from corecontext.graphs import CapturedStep, weak_call
from corecontext.inference.prefill import new_cache
from corecontext.inference.sampling import Sampler
from corecontext.integrations.hf.cache_layers import (
    CCALayer,
    GivenLayer,
    GrowingCache,
    layer_bytes,
)
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.integrations.hf.enabling import Handle
from corecontext.integrations.hf.rotation import rotation_of
from corecontext.ops.fetch.prompt_rule import most_whole


class SessionKey(NamedTuple):
    """Sizes and settings that requests must share to use the same session."""

    batch: int
    """Rows."""
    max_length: int
    """Most tokens a row, prompt and answer."""
    config: CCAConfig | None
    """CCA's settings; None without CCA."""
    streams: int
    """Random streams, 1 or `batch`."""
    rotated_length: int | None = None
    """Length of the whole text, prompt and answer, where the rotation depends on it."""


def runs_full_attention(model: Any, handle: Handle | None, key: SessionKey, static: bool) -> bool:
    """Whether requests of a session run under full attention, because that is the fastest for so
    few tokens (`most_whole`); `static` asks for fixed buffers."""
    if handle is None or key.config is None or not may_run_full_attention(model, handle):
        return False
    device = model.device.type
    # Fixed buffers on a CPU are for compiled steps, which take compact layers only.
    if static and device == "cpu":
        return False
    return key.batch * key.max_length <= most_whole(key.config, device)


def may_run_full_attention(model: Any, handle: Handle) -> bool:
    """Whether a model's layers can run under full attention in our caches: not sliding-window
    layers, which have caches of their own (`hybrid`), nor layers of several devices, which share no
    padding, nor those with a softcap, which PyTorch's attention has not."""
    text = model.config.get_text_config(decoder=True)
    # mutant inference: a short request loses the softcap
    has_softcap = getattr(text, "attn_logit_softcapping", None) is not None
    return not handle.hybrid and num_devices(model) == 1 and not has_softcap


def num_devices(model: Any) -> int:
    """Return how many devices share the layers of a model in this process."""
    return max(1, len(set(getattr(model, "hf_device_map", {}).values())))


def can_capture(model: Any) -> bool:
    """Whether a step of a model can be captured: a graph has one device, and processes that share a
    model would have to capture, or fail to, together."""
    # mutant inference: processes that share a model capture steps
    return num_devices(model) == 1 and (getattr(model, "tp_size", None) or 1) == 1


@contextlib.contextmanager
def configured(handle: Handle | None, config: CCAConfig | None) -> Iterator[None]:
    """Set a model to a request's settings for the length of a with block: requests with other
    settings take turns with it."""
    before = None if handle is None else handle.config
    if handle is None or config is None or before == config:
        yield
        return
    handle.configure(**config.to_dict())
    try:
        yield
    # mutant serve: a chunk that fails leaves its settings behind
    finally:
        # mutant inference: a request leaves its settings behind
        handle.configure(**before.to_dict())


@dataclass(eq=False, repr=False)
class Session:
    """Cache and buffers for batches of one size, length and settings; used for one request after
    another.

    Where every layer is compact, and `static` is set or a GPU's raw tokens are in host memory, the
    cache has fixed buffers: a step reads and writes tensors that never move. Otherwise
    (sliding-window layers, no CCA, a CPU) the cache grows and steps are not captured.
    """

    model: Any
    """Runs the steps that `forward` does not."""
    handle: Handle | None
    """The model's CCA handle; None for full attention."""
    key: SessionKey
    _: KW_ONLY
    static: bool
    """Whether to use fixed buffers where the model allows it."""
    capture: bool
    """Whether to capture steps in CUDA graphs where buffers are fixed."""
    forward: Any
    """Runs a step where buffers are fixed: the model, or a compiled forward."""

    def __post_init__(self) -> None:
        self._all_compact = self.handle is not None and not self.handle.hybrid
        config = self.key.config
        device = self.model.device
        on_gpu = device.type == "cuda"
        from_host = config is not None and config.fetches_from_host and on_gpu
        self.full_attention = runs_full_attention(self.model, self.handle, self.key, self.static)
        """Whether requests run under full attention: the cache has all tokens raw."""
        # Fixed also for raw tokens in host memory: that is then pinned at once, and a request that
        # does not fit fails before its first token.
        self.fixed = (self.static or from_host) and self._all_compact
        # A captured step would rotate by the frequencies of the length when it was captured.
        is_fixed = self.fixed and self.key.rotated_length is None
        self.capture = self.capture and is_fixed and on_gpu and can_capture(self.model)
        self.pad = torch.zeros(self.key.batch, dtype=torch.long, device=device)
        """Left padding of each row, for layers under full attention."""
        self._pads = [0] * self.key.batch  # the same on the host
        self.seen: Tensor | None = None
        """Tokens of a row in each layer, [layers], under full attention with fixed buffers."""
        self.cache = self._new_cache()
        # What the next step feeds, [B, 1]: tokens, always of the vocabulary, and their positions.
        self.tokens = torch.zeros(self.key.batch, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros_like(self.tokens)
        # The tokens as they were chosen, maybe `INVALID`, for the host.
        self.chosen = torch.zeros_like(self.tokens)
        # [B, max_length], for padded rows beside layers that are not compact.
        self.mask: Tensor | None = None
        self.length = 0  # tokens of a row, padding included
        self.sampler = Sampler(device, self.key.streams)
        self._captured: dict[str, CapturedStep] = {}  # by kind of sampling

    def _new_cache(self) -> Any:
        if self.full_attention:
            assert self.handle is not None, "full attention takes no requests of its own"
            size = self.key.max_length
            seen: Any = [None] * len(self.handle.full)
            if self.fixed:
                self.seen = torch.zeros(len(seen), dtype=torch.long, device=self.pad.device)
                seen = self.seen
            layers = [FullLayer(size, self.pad, fixed=self.fixed, seen=x) for x in seen]
            return Cache(layers=[GivenLayer(layer) for layer in layers])
        if self.fixed:
            return new_cache(self.model, self.key.max_length)
        return GrowingCache(self.model.config, self.key.max_length)

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the cache holds on the device."""
        return sum(
            layer.compact.allocated_bytes if isinstance(layer, CCALayer) else layer_bytes(layer)
            for layer in self.cache.layers
        )

    @property
    def _compact_layers(self) -> list[Any]:
        """The compact caches of all layers that have one; a `FullLayer` stands in for one, too."""
        return [layer.compact for layer in self.cache.layers if isinstance(layer, CCALayer)]

    @property
    def allocated_host_bytes(self) -> int:
        """Bytes that the cache holds in host memory."""
        return sum(layer.allocated_host_bytes for layer in self._compact_layers)

    @contextlib.contextmanager
    def configured(self) -> Iterator[None]:
        """Set the model to this session's settings, and back."""
        with (
            configured(self.handle, None if self.full_attention else self.key.config),
            rotation_of(self.model, self.key.rotated_length),
        ):
            yield

    @property
    def _asks_device(self) -> bool:
        """Whether a step asks the device for a number, so that it cannot be captured."""
        caches = (cache for layer in self._compact_layers for cache in parts_of(layer))
        return any(cache.asks_device for cache in caches)

    def reset(self) -> None:
        """Empty the cache for the next request; fixed buffers stay in place for captured steps."""
        if self.fixed:
            self.cache.reset()
        else:
            self.cache = self._new_cache()
        self.mask = None
        self.length = 0
        if self.seen is not None:
            self.seen.zero_()

    def begin_prompt(self, pads: list[int]) -> None:
        """Prepare layers under full attention for a prompt with this left padding of each row."""
        if not self.full_attention:
            return
        if pads != self._pads:
            self.pad.copy_(torch.tensor(pads))
            self._pads = list(pads)
        for layer in self._compact_layers:
            layer.begin(pads)

    def begin(self, positions: Tensor, pads: list[int], length: int) -> None:
        """Prepare steps after a prefill of `length` tokens a row, padding included; positions [B]
        are those of the next tokens."""
        self.positions.copy_(positions[:, None])
        self.length = length
        if self.full_attention:
            for layer in self._compact_layers:
                layer.end_prompt()
        if self.seen is not None:
            self.seen.fill_(length)
        if max(pads) and not self._all_compact:
            slots = torch.arange(self.key.max_length, device=positions.device)
            self.mask = (slots >= torch.tensor(pads, device=positions.device)[:, None]).long()

    def shrink_window(self, key: SessionKey) -> None:
        """See `CompactLayer.shrink_window`; buffers move, so steps are captured anew.

        Args:
            key: This session's, with a smaller window.
        """
        assert key.config is not None, "a request without CCA has no window"
        if self.full_attention:
            self.key = key  # full attention has no window
            return
        Parts(self._compact_layers).shrink_window(key.config.window_size)
        self.key = key
        # mutant inference: steps captured before a shrink are replayed
        self._captured.clear()

    def step(self, kind: str) -> None:
        """Feed `tokens` and put the next tokens in their place; the host reads no result.

        Args:
            kind: `Sampling.kind`.
        """
        self.length += 1
        if kind not in self._captured and (not self.capture or self._asks_device):
            self._step(kind)
            return
        if kind not in self._captured:
            self._captured[kind] = CapturedStep(
                functools.partial(weak_call(self._step), kind),
                name=f"a step of {type(self.model).__name__}",
                generators=self.sampler.generators,
                device=self.tokens.device,
            )
        self._captured[kind]()

    @torch.no_grad()
    def _step(self, kind: str) -> None:
        mask = None if self.mask is None else self.mask[:, : self.length]
        forward = self.forward if self.fixed and not self._asks_device else self.model
        with self.configured():
            out = forward(
                self.tokens,
                attention_mask=mask,
                position_ids=self.positions,
                **with_cache(self.cache),
                use_cache=True,
            )
        self.choose(out.logits[:, -1], kind)
        self.positions.add_(1)

    def choose(self, logits: Tensor, kind: str) -> None:
        """Choose the next tokens from logits [B, vocabulary], and put them where a step reads."""
        self.chosen.copy_(self.sampler.choose(logits, kind))
        self.tokens.copy_(self.chosen.clamp(min=0))
