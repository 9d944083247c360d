"""Generate with a model under CCA: each request gets its settings, a cache and captured steps."""

import weakref
from collections import OrderedDict
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from corecontext.cache.host_memory import available_bytes
from corecontext.config import check_int
from corecontext.inference.fuse import Fused
from corecontext.inference.limits import check_length, host_bytes_of, rounded_up
from corecontext.inference.policy import Load, Policy, cut_to, settings_for
from corecontext.inference.prefill import read_left_padding
from corecontext.inference.session import Session, SessionKey, runs_full_attention
from corecontext.inference.stream import Generation, Prompt, Stream
from corecontext.integrations.hf.enabling import handle_of
from corecontext.integrations.hf.rotation import rotated_length

IDLE_SHARE = 0.5
"""Share of the free host memory up to which idle caches stay beside a new one. To pin memory anew,
and to capture steps on it, takes longer than to read a short prompt."""


@dataclass(eq=False, repr=False)
class Engine:
    """Generate with one model, request after request, on buffers that are made once.

    On a GPU the whole step - embedding, layers, output head, sampling - is captured in a CUDA
    graph, once per batch size, length, g, s and kind of sampling, and replayed for every token of
    every later request. On a CPU, for models with sliding-window layers and for models without
    CCA, steps run uncaptured and the cache grows.

    A captured step runs as it was captured: call `clear` where modules, adapters or hooks change or
    weights move between requests.

    Raises:
        ValueError: a setting breaks a rule.
    """

    model: Any
    """A Hugging Face causal language model, usually with CCA enabled."""
    _: KW_ONLY
    max_length: int | None = None
    """Tokens a row, prompt and answer, that buffers are made for; None rounds up each request's
    need (`limits.rounded_up`), so that similar requests share buffers."""
    chunk_size: int | None = None
    """Tokens of a prompt, a row, in one forward pass; None follows from the free memory."""
    static: bool | None = None
    """Whether caches have fixed buffers, which are kept for later requests; None fixes them where
    steps are captured or compiled. Their steps are arithmetic on whole buffers, which costs more on
    a CPU than it saves."""
    capture: bool = True
    """False runs steps uncaptured on a GPU too."""
    fuse: str | None = "kernels"
    """"kernels" runs norms and rotary by kernels that exist, on a GPU. "compile" fuses elementwise
    work: of MLP and norm modules during prefill, which saves their intermediate tensors, and of the
    whole step in decoding, where buffers are fixed. Compiling takes from seconds to minutes at the
    first request of each kind. None runs the model as it is."""
    policy: Policy | None = None
    """Gives (group_size, window_size), or these and fetch_groups, to requests that choose none by
    themselves; None leaves those of the model's handle. A model with a g for each layer or head
    keeps its g."""
    cache_bytes_budget: int | None = None
    """Bytes that caches may take on the device; only reported to the policy."""
    host_bytes_budget: int | None = None
    """Most bytes of raw tokens in host memory (`CCAConfig.store`), within the memory available when
    a request comes; None is all of that."""
    keep: int = 2
    """Idle sessions (caches with their graphs) kept for later requests; fewer where their raw
    tokens and those of a new one take more than half of the free host memory."""

    time_to_first_token: float | None = field(default=None, init=False)
    """Seconds from the start of the last request to its first token."""

    def __post_init__(self) -> None:
        if self.max_length is not None:
            check_int("max_length", self.max_length, 1)
        check_int("keep", self.keep, 0)
        if self.host_bytes_budget is not None and self.host_bytes_budget < 0:
            raise ValueError(f"host_bytes_budget must be at least 0, got {self.host_bytes_budget}.")
        self.handle = handle_of(self.model)
        if self.policy is not None and self.handle is None:
            raise ValueError(
                "policy must be used with CCA enabled, got a model without. "
                "Call corecontext.enable(model)."
            )
        self.fused = Fused(self.model, self.fuse)
        if self.static is None:
            self.static = self.fuse == "compile" or self.model.device.type == "cuda"
        self._idle: OrderedDict[SessionKey, Session] = OrderedDict()
        # A stream that is dropped without `close` takes its session with it.
        self._busy: weakref.WeakSet[Session] = weakref.WeakSet()

    # Requests

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> list[list[int]]:
        """Return the new tokens of each row, up to and with the token that ended it; arguments as
        for `stream`."""
        rows: list[list[int]] = [[] for _ in range(len(input_ids))]
        with self.stream(input_ids, attention_mask, **options) as stream:
            for step in stream:
                for row, token in zip(rows, step):
                    if token is not None:
                        row.append(token)
        return rows

    def stream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Stream:
        """Start a request; the prompt is read when its first token is asked for.

        Args:
            input_ids: [B, L], int64, on the model's device.
            attention_mask: [B, L], 0 for padding on the left; None means no padding.
            options: Fields of `Generation`: max_new_tokens, and optionally sampling, seed,
                eos_token_id, stop_strings, tokenizer, group_size, window_size, fetch_groups,
                queue_length and on_chunk.

        Raises:
            MemoryError: raw tokens of the request would not fit in host memory.
            TypeError: an argument is of another kind.
            ValueError: an argument breaks a rule, or prompt and answer exceed the positions or
                `max_length`.
        """
        pads = read_left_padding(input_ids, attention_mask)
        if handle_of(self.model) is not self.handle:
            raise ValueError(
                "model must stay as it was when the engine was made, got CCA enabled or disabled "
                "since. Make a new engine."
            )
        generation = Generation(**options)
        batch, length = input_ids.shape
        self._check_tokens(input_ids)
        streams = len(generation.seeds(batch))
        new_tokens = generation.max_new_tokens
        check_length(self.model.config, length - min(pads), new_tokens)
        if self.max_length is not None and length + new_tokens > self.max_length:
            raise ValueError(
                f"max_length must hold prompt and answer, got {self.max_length} for {length} and "
                f"{new_tokens} tokens. Make the engine with a larger max_length."
            )
        max_length = self.max_length or rounded_up(length + new_tokens)
        config = self._settings_for(generation, pads, length)
        if config is not None:
            config = cut_to(config, max_length)
        lengths = [length - pad + new_tokens for pad in pads]
        key = SessionKey(batch, max_length, config, streams, rotated_length(self.model, lengths))
        self._check_host_memory(key)
        mask = attention_mask if max(pads) else None
        return Stream(self, key, Prompt(input_ids, mask, pads), generation)

    def _check_tokens(self, input_ids: Tensor) -> None:
        """Raise unless all tokens are in the model's vocabulary: any other would stop a GPU for
        good."""
        # Under tensor parallelism the embedding module has only this rank's share of the rows.
        rows_here = getattr(self.model.get_input_embeddings(), "num_embeddings", 0)
        count = max(rows_here, self.model.config.get_text_config(decoder=True).vocab_size)
        if input_ids.device != self.model.device and not hasattr(self.model, "hf_device_map"):
            raise ValueError(
                f"input_ids must be on the model's device {self.model.device}, got "
                f"{input_ids.device}. Use input_ids.to(model.device)."
            )
        low, high = torch.stack(input_ids.aminmax()).tolist()
        if low < 0 or high >= count:
            raise ValueError(
                f"input_ids must be from 0 to {count - 1}, got {low} to {high}. Use the model's "
                "own tokenizer."
            )

    def _check_host_memory(self, key: SessionKey) -> None:
        """Raise unless a request's raw tokens fit in host memory beside those of running requests;
        idle caches can go."""
        needed = self._host_bytes(key)
        free = self._free_host_bytes() if needed else None
        if free is not None and needed > free:
            raise MemoryError(
                f"raw tokens must fit in host memory, got {needed} bytes for {key.batch} rows of "
                f"{key.max_length} tokens with {max(0, free)} bytes free. Use fewer or shorter "
                "rows, a larger host_bytes_budget, cache_dtype='int8' or fetch_groups=0."
            )

    def _free_host_bytes(self) -> int | None:
        """Return the bytes of host memory that idle and new sessions may take together, by the
        budget and by what is available; None where neither is known."""
        available = available_bytes()
        limits = [] if available is None else [available + self.host_bytes_kept]
        if self.host_bytes_budget is not None:
            busy = sum(self._host_bytes(session.key) for session in self._busy)
            limits.append(self.host_bytes_budget - busy)
        return min(limits, default=None)

    def _host_bytes(self, key: SessionKey) -> int:
        """Bytes of raw tokens in host memory of a session."""
        if key.config is None or not key.config.fetches_from_host:
            return 0
        model = self.model
        if runs_full_attention(model, self.handle, key, bool(self.static)):
            return 0
        return key.batch * host_bytes_of(model.config, model.dtype, key.config, key.max_length)

    def _settings_for(self, generation: Generation, pads: list[int], length: int) -> Any:
        """Choose CCA's settings of a request; None without CCA.

        Args:
            pads: Left padding of each row, in tokens.
            length: Tokens of a row, padding included.
        """
        group_size = generation.group_size
        window_size = generation.window_size
        fetch_groups = generation.fetch_groups
        if self.handle is None:
            if any(size is not None for size in (group_size, window_size, fetch_groups)):
                raise ValueError(
                    "group_size, window_size and fetch_groups must be used with CCA enabled, got "
                    "a model without. Call corecontext.enable(model)."
                )
            return None
        # `num_groups` gives g by the length of the rows, which must be one.
        common_length = length - pads[0] if len(set(pads)) == 1 else None
        return settings_for(
            self.handle.config,
            group_size,
            window_size,
            common_length,
            self.policy,
            self.load(generation.queue_length, length - min(pads)),
            fetch_groups,
        )

    def load(self, queue_length: int = 0, prompt_length: int = 0) -> Load:
        """Return how busy this engine is now."""
        return Load(
            queue_length,
            self.cache_bytes_used,
            self.cache_bytes_budget,
            self.time_to_first_token,
            prompt_length,
            self.host_bytes_used,
            self.host_bytes_budget,
        )

    # Sessions

    @property
    def host_bytes_used(self) -> int:
        """Bytes that the caches of running requests hold in host memory."""
        return sum(session.allocated_host_bytes for session in self._busy)

    @property
    def host_bytes_kept(self) -> int:
        """Bytes that idle caches hold in host memory for later requests; `clear` frees them."""
        return sum(session.allocated_host_bytes for session in self._idle.values())

    @property
    def cache_bytes_used(self) -> int:
        """Bytes that the caches of running requests hold on the device."""
        return sum(session.allocated_bytes for session in self._busy)

    @property
    def cache_bytes_kept(self) -> int:
        """Bytes that idle caches hold on the device for later requests; `clear` frees them."""
        return sum(session.allocated_bytes for session in self._idle.values())

    def clear(self) -> None:
        """Drop idle caches and captured steps."""
        self._idle.clear()

    def take(self, key: SessionKey) -> Session:
        """Return an idle session of this key, or make one; it counts as busy up to `give_back`."""
        self._check_host_memory(key)  # another request may have come since
        session = self._idle.pop(key, None)
        if session is None:
            # Free idle sessions before the new one is allocated, not after.
            if self.keep:
                self._evict(self.keep - 1)
            self._make_host_room(self._host_bytes(key))
            session = Session(
                self.model,
                self.handle,
                key,
                static=bool(self.static),
                capture=self.capture,
                forward=self.fused.step,
            )
        session.reset()
        self._busy.add(session)
        return session

    def give_back(self, session: Session, reusable: bool) -> None:
        """Keep a session as idle for a later request of its key, if it can be used again."""
        self._busy.remove(session)
        if not reusable or not session.fixed:  # a cache that grew has no buffers to reuse
            return
        self._idle[session.key] = session
        self._idle.move_to_end(session.key)
        self._evict(self.keep)

    def _make_host_room(self, needed: int) -> None:
        """Drop the oldest idle sessions with raw tokens in host memory until the others and
        `needed` bytes more leave enough of what is free."""
        if not needed:
            return
        limit = IDLE_SHARE * (self._free_host_bytes() or 0)
        for key in [key for key, x in self._idle.items() if x.allocated_host_bytes]:
            if needed + self.host_bytes_kept > limit:
                # mutant inference: idle caches keep their host memory
                del self._idle[key]

    def _evict(self, count: int) -> None:
        """Drop the oldest idle sessions until `count` are left."""
        while len(self._idle) > count:
            self._idle.popitem(last=False)
