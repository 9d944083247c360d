"""Generation with a model under CCA: which settings, cache and captured steps each request gets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from corecontext.config import check_int
from corecontext.inference.fuse import Fused
from corecontext.inference.limits import check_length
from corecontext.inference.policy import Load, Policy
from corecontext.inference.prefill import read_left_padding
from corecontext.inference.sampling import Sampling
from corecontext.inference.session import Session
from corecontext.inference.stream import Stream
from corecontext.integrations.transformers import handle_of
from corecontext.visibility import group_size_for


class Engine:
    """Generates with one model, request after request, on buffers that are made once.

    On a GPU the whole step - embedding, layers, output head, sampling - is captured in a CUDA
    graph, once per batch size, length, g, s and kind of sampling, and replayed for every token of
    every later request. On a CPU steps run as they are, and the cache grows. So do models with
    sliding-window layers, and models without CCA.

    Args:
        model: A Hugging Face causal language model, usually with CCA enabled.
        max_length: Tokens a row, prompt and answer, that buffers are made for; None rounds each
            request's need up, by an eighth at most, so that similar requests share buffers.
        chunk_size: As for `prefill`.
        static: Whether caches have fixed buffers, which are kept for later requests; None means
            where steps are captured or compiled. Their steps are arithmetic on whole buffers, which
            costs more on a CPU than it saves.
        capture: False runs steps uncaptured on a GPU too.
        fuse: "compile" fuses elementwise work: of MLP and norm modules during prefill, which saves
            their intermediate tensors, and of the whole step in decoding, where buffers are fixed.
            Compiling takes from seconds to minutes at the first request of each kind.
        policy: Gives (group_size, window_size) of requests that choose none; None leaves those of
            the model's handle.
        cache_bytes_budget: Reported to the policy, bytes.
        keep: Idle sessions (caches with their graphs) kept for later requests.

    Raises:
        ValueError: a setting breaks a rule.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int | None = None,
        chunk_size: int | None = None,
        static: bool | None = None,
        capture: bool = True,
        fuse: str | None = None,
        policy: Policy | None = None,
        cache_bytes_budget: int | None = None,
        keep: int = 2,
    ) -> None:
        for name, value, least in (("max_length", max_length, 1), ("keep", keep, 0)):
            if value is not None:
                check_int(name, value, least)
        self.model, self.handle = model, handle_of(model)
        if policy is not None and self.handle is None:
            raise ValueError(
                "policy must be used with CCA enabled, got a model without. "
                "Call corecontext.enable(model)."
            )
        self.max_length, self.chunk_size, self.capture = max_length, chunk_size, capture
        self.fused = Fused(model, fuse)
        self.static = (
            (fuse is not None or model.device.type == "cuda") if static is None else static
        )
        self.policy, self.cache_bytes_budget, self.keep = policy, cache_bytes_budget, keep
        self.time_to_first_token: float | None = None
        """Seconds from the start of the last request to its first token."""
        self._idle: OrderedDict[tuple, Session] = OrderedDict()
        self._busy: list[Session] = []

    # Requests
    # --------------------------------------------------------------------------------------------------

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> list[list[int]]:
        """The new tokens of each row, up to and with the one that ended it; arguments as for
        `stream`."""
        rows: list[list[int]] = [[] for _ in range(len(input_ids))]
        with self.stream(input_ids, attention_mask, **options) as stream:
            for step in stream:
                for row, token in zip(rows, step):
                    if token is not None:
                        row.append(token)
        return rows

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        seed: int | Sequence[int] = 0,
        eos_token_id: int | Sequence[int] | None = None,
        stop_strings: str | Sequence[str] = (),
        tokenizer: Any = None,
        group_size: int | None = None,
        window_size: int | None = None,
        queue_length: int = 0,
        on_chunk: Callable[[int], Any] = lambda tokens: None,
    ) -> Stream:
        """Start a request; the prompt is read when its first token is asked for.

        Args:
            input_ids: [B, L], int64, on the model's device.
            attention_mask: [B, L], 0 for padding on the left; None means no padding.
            max_new_tokens: Most tokens to make for each row.
            sampling: How tokens are chosen; None takes the likeliest.
            seed: One for the batch, or one for each row: then a row's tokens do not depend on its
                neighbours.
            eos_token_id: Tokens that end a row; None takes the model's generation config's. [] for
                none.
            stop_strings: Texts, or one, that end a row with the token that completes them. Needs
                `tokenizer`.
            tokenizer: Decodes tokens for `stop_strings`.
            group_size, window_size: This request's g and s; what is None comes from the policy,
                else the handle.
            queue_length: Waiting requests, for the policy.
            on_chunk: Called with the tokens a row that have been read, after each chunk of the
                prompt.

        Raises:
            TypeError: an argument is of another kind.
            ValueError: an argument breaks a rule, or prompt and answer exceed the positions or
                `max_length`.
        """
        pads = read_left_padding(input_ids, attention_mask)
        if handle_of(self.model) is not self.handle:
            raise ValueError(
                "model must stay as it was when the engine was made, got CCA enabled or disabled since. "
                "Make a new engine."
            )
        batch, length = input_ids.shape
        check_int("max_new_tokens", max_new_tokens, 1)
        self._check_tokens(input_ids)
        stop_strings = (stop_strings,) if isinstance(stop_strings, str) else stop_strings
        if sampling is not None and not isinstance(sampling, Sampling):
            raise TypeError(
                f"sampling must be a Sampling, got {sampling!r}. Use Sampling(temperature=...)."
            )
        if stop_strings and tokenizer is None:
            raise ValueError(
                "tokenizer must be given with stop_strings, got None. Pass the model's tokenizer."
            )
        if not all(stop_strings):
            raise ValueError(
                "stop_strings must not be empty strings, got ''. Leave them out for none."
            )
        if isinstance(seed, (str, float)) or not (
            isinstance(seed, int) or all(isinstance(one, int) for one in seed)
        ):
            raise TypeError(f"seed must be an integer or one for each row, got {seed!r}.")
        seeds = [seed] if isinstance(seed, int) else list(seed)
        if not isinstance(seed, int) and len(seeds) != batch:
            raise ValueError(
                f"seed must be one number or one for each of {batch} rows, got {len(seeds)}."
            )
        if not all(-(2**63) <= one < 2**63 for one in seeds):
            raise ValueError(f"seed must be from -2**63 to 2**63 - 1, got {seed}.")
        check_length(self.model.config, length - min(pads), max_new_tokens)
        if self.max_length is not None and length + max_new_tokens > self.max_length:
            raise ValueError(
                f"max_length must hold prompt and answer, got {self.max_length} for {length} and "
                f"{max_new_tokens} tokens. Make the engine with a larger max_length."
            )
        if eos_token_id is None:
            eos_token_id = self.model.generation_config.eos_token_id
        if isinstance(eos_token_id, str):
            raise TypeError(
                f"eos_token_id must be token numbers, got {eos_token_id!r}. Use stop_strings for texts."
            )
        eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id or ())
        config = self._choose(pads, length, group_size, window_size, queue_length)
        room = self.max_length or rounded_up(length + max_new_tokens)
        return Stream(
            self,
            (batch, room, config, len(seeds)),
            input_ids,
            attention_mask if max(pads) else None,
            pads,
            max_new_tokens,
            sampling or Sampling(),
            seeds,
            eos,
            tuple(stop_strings),
            tokenizer,
            on_chunk,
        )

    def _check_tokens(self, input_ids: Tensor) -> None:
        """Raise unless all are numbers of the model's vocabulary: a GPU would stop for good at
        another one."""
        share = getattr(
            self.model.get_input_embeddings(), "num_embeddings", 0
        )  # here, where processes split it
        count = max(share, self.model.config.get_text_config(decoder=True).vocab_size)
        if input_ids.device != self.model.device and not hasattr(self.model, "hf_device_map"):
            raise ValueError(
                f"input_ids must be on the model's device {self.model.device}, got {input_ids.device}. "
                "Use input_ids.to(model.device)."
            )
        low, high = torch.stack(input_ids.aminmax()).tolist()
        if low < 0 or high >= count:
            raise ValueError(
                f"input_ids must be from 0 to {count - 1}, got {low} to {high}. Use the model's own "
                "tokenizer."
            )

    def _choose(
        self,
        pads: list[int],
        length: int,
        group_size: int | None,
        window_size: int | None,
        queue_length: int,
    ) -> Any:
        """The settings of a request; `num_groups` is turned into the g that it means for this
        prompt."""
        if self.handle is None:
            if group_size is not None or window_size is not None:
                raise ValueError(
                    "group_size and window_size must be used with CCA enabled, got a model without. "
                    "Call corecontext.enable(model)."
                )
            return None
        config = self.handle.config
        if self.policy is not None and (group_size is None or window_size is None):
            g, s = self.policy(self.load(queue_length, length - min(pads)))
            group_size = g if group_size is None else group_size
            window_size = s if window_size is None else window_size
        if window_size is not None:
            config = config.replace(window_size=window_size)
        if group_size is not None:
            return config.replace(group_size=group_size, num_groups=None)
        if config.num_groups is None:
            return config
        if len(set(pads)) > 1:
            raise ValueError(
                "num_groups must be used with rows of one length, got different padding. Set group_size, "
                "or run the rows one by one."
            )
        g = group_size_for(length - pads[0], config.window_size, config.num_groups)
        return config.replace(group_size=g, num_groups=None)

    def load(self, queue_length: int = 0, prompt_length: int = 0) -> Load:
        """How busy this engine is now."""
        return Load(
            queue_length,
            self.cache_bytes_used,
            self.cache_bytes_budget,
            self.time_to_first_token,
            prompt_length,
        )

    # Sessions
    # --------------------------------------------------------------------------------------------------

    @property
    def cache_bytes_used(self) -> int:
        """Bytes that the caches of running requests hold."""
        return sum(session.allocated_bytes for session in self._busy)

    @property
    def cache_bytes_kept(self) -> int:
        """Bytes that idle caches hold for later requests; `clear` frees them."""
        return sum(session.allocated_bytes for session in self._idle.values())

    def clear(self) -> None:
        """Drop idle caches and captured steps."""
        self._idle.clear()

    def take(self, key: tuple) -> Session:
        """A session of this batch, length, settings and number of random streams, used before or
        new."""
        session = self._idle.pop(key, None)
        if session is None:
            batch, room, config, streams = key
            while (
                self.keep and len(self._idle) >= self.keep
            ):  # before the new one is allocated, not after
                self._idle.popitem(last=False)
            session = Session(
                self.model,
                self.handle,
                config,
                batch,
                room,
                streams,
                static=self.static,
                capture=self.capture,
                forward=self.fused.step,
            )
        session.reset()
        self._busy.append(session)
        return session

    def give_back(self, key: tuple, session: Session, reusable: bool) -> None:
        """Keep a session for later, the newest ones first."""
        self._busy.remove(session)
        if not reusable or not session.fixed:  # a cache that grew has nothing to reuse
            return
        self._idle[key] = session
        while len(self._idle) > self.keep:
            self._idle.popitem(last=False)


def rounded_up(length: int) -> int:
    """A length at most an eighth larger, of few different ones: a power of two or one of seven
    steps to the next."""
    step = max(64, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step
