"""Define the settings and the tuples of tensors that all layers below the public operator share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from corecontext.config import PAPER_RULE, CCAConfig
from corecontext.ops.fetch.choice import Choice
from corecontext.ops.fetch.index import Index, index_of
from corecontext.ops.rotary import Rotary
from corecontext.visibility import (
    group_size_for,
    is_full_attention,
    num_sinks,
    num_visible_cores,
)


@dataclass(frozen=True)
class Spec:
    """Hold the settings of one attention call, all but its tensors; not validated again."""

    group_size: int | tuple[int, ...]
    """Tokens per core token (g); a tuple holds one for each KV head, until `head_split` splits the
    heads by it."""
    window_size: int
    """Nearest tokens that every query sees uncompressed (s)."""
    scale: float
    """Factor of the scores."""
    num_groups: int | None = None
    """Constant number of groups; replaces group_size by the length of each sequence."""
    sink_size: int = 0
    """First tokens of a sequence kept raw, in tokens; `sinks` is rounded up to whole groups."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    core_mass: bool = False
    """Whether the entropy of its pooling weights is added to a core token's score."""
    fetch_groups: int = 0
    """Groups whose raw tokens each query sees instead of their core tokens (k)."""
    fetch_index: str | Index = PAPER_RULE["fetch_index"]
    """The index that chooses them, or its name; the default is that of `cca_attention`."""
    fetch_share: int = 1
    """Neighbouring queries that share one choice."""
    rotary: Rotary | None = None
    """The keys' rotation, for core keys at the middle of their group; None pools keys as they
    are."""

    @classmethod
    def of(
        cls, config: CCAConfig, rotary: Rotary | None, scale: float, softcap: float | None = None
    ) -> Spec:
        """Make the Spec of a layer's settings; each query chooses by itself.

        Raises:
            ValueError, TypeError: core keys take their middle position, and rotary is not given.
        """
        return cls(
            config.head_group_sizes or config.group_size,
            config.window_size,
            scale,
            config.num_groups,
            config.sink_size,
            softcap,
            config.core_mass,
            config.fetch_groups,
            config.fetch_index,
            rotary=check_rotary(rotary, config.core_position),
        )

    def replace(self, **changes: Any) -> Spec:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def of_full(self, end: int) -> Spec:
        """Return settings under which tokens before position `end` have full attention: a window
        that no token leaves, a multiple of 16, as Triton compiles kernels for those and for
        others."""
        return self.replace(window_size=-(-end // 16) * 16, sink_size=0, fetch_groups=0)

    def for_length(self, seq_len: int) -> Spec:
        """Return a copy whose group size is that of a sequence of this length."""
        if self.num_groups is None:
            return self
        size = group_size_for(seq_len, self.window_size, self.num_groups)
        return self.replace(group_size=size, num_groups=None)

    @functools.cached_property
    def index(self) -> Index:
        """The index that chooses groups; kept, so that torch.compile reads it as an attribute."""
        return index_of(self.fetch_index)

    @property
    def num_centred(self) -> int:
        """Tokens after the sinks whose mean key centres the index."""
        return self.index.num_centred(self.group_size, self.window_size)

    @property
    def sinks(self) -> int:
        """First tokens kept raw: sink_size rounded up to whole groups (n)."""
        return num_sinks(self.sink_size, self.group_size)

    def is_full(self, seq_len: int, choice: Choice | None = None) -> bool:
        """Whether a sequence of this length has full attention: no core token is seen, groups are
        single tokens, or every query fetches all groups that it sees."""
        g = self.group_size
        sees_none = is_full_attention(seq_len, g, self.window_size, self.sinks)
        return sees_none or self.fetches_all(seq_len, choice)

    def fetches_all(self, seq_len: int, choice: Choice | None = None) -> bool:
        """Whether every query of a sequence of this length fetches all groups that it sees; False
        for a choice that is given, which may lack some."""
        if choice is not None:
            return False
        visible = num_visible_cores(seq_len - 1 - self.sinks, self.group_size, self.window_size)
        return self.fetch_groups > 0 and self.fetch_groups >= visible


def check_rotary(rotary: Rotary | None, core_position: str) -> Rotary | None:
    """Return the rotation that core keys need, None where keys are pooled as they are."""
    if core_position == "token":
        return None
    if rotary is None:
        raise ValueError(
            "rotary must be given for core_position='middle', got None. "
            "Pass rotary=Rotary.from_theta(theta, head_dim), or core_position='token'."
        )
    if not isinstance(rotary, Rotary):
        raise TypeError(
            f"rotary must be a corecontext.ops.rotary.Rotary, got {type(rotary).__name__}. "
            "Pass Rotary.from_theta(theta, head_dim)."
        )
    return rotary


# A whole batch


class Inputs(NamedTuple):
    """Hold the tensors of a call that have a dimension of heads."""

    q: Tensor
    """[B, H, L, D], rotary applied."""
    k: Tensor
    """[B, Hkv, L, D], rotary applied."""
    v: Tensor
    """[B, Hkv, L, D]."""
    choice: Choice | None = None
    """Groups that queries fetch; None chooses them by the index."""


class Ragged(NamedTuple):
    """Say where the sequences of a batch begin and end, in one of three ways; without any, each row
    is a sequence."""

    attention_mask: Tensor | None = None
    """[B, L], 0 for padding at the ends of a row."""
    cu_seqlens: Tensor | None = None
    """[n + 1], boundaries of the documents packed in a batch of one."""
    position_ids: Tensor | None = None
    """[1 or B, L]; a document starts wherever positions do not rise by one."""


EACH_ROW = Ragged()
"""Each row of the batch is a sequence."""


# Sequences of KV heads: N = rows x KV heads, r query heads each


class Tokens(NamedTuple):
    """Hold queries and the raw tokens that they may see."""

    q: Tensor
    """[N, r, T, D], at positions q_start .. q_start + T - 1."""
    k: Tensor
    """[N, S, D], at positions k_start .. k_start + S - 1, up to the last query."""
    v: Tensor
    """[N, S, D]."""
    q_start: int = 0
    k_start: int = 0
    sink_k: Tensor | None = None
    """Keys of the sinks so far, [N, min(n, q_start + T), D], where k begins behind them; None where
    k begins with them."""
    sink_v: Tensor | None = None

    def until(self, count: int) -> Tokens:
        """Return the first `count` queries, with the raw tokens up to the last of them."""
        end = self.q_start + count - self.k_start
        return self._replace(q=self.q[:, :, :count], k=self.k[:, :end], v=self.v[:, :end])

    def after(self, count: int) -> Tokens:
        """Return the queries after the first `count`."""
        return self._replace(q=self.q[:, :, count:], q_start=self.q_start + count)

    def check_whole(self) -> None:
        """Raise ValueError unless the queries are those of a whole sequence."""
        if self.q_start:
            raise ValueError(
                f"q_start must be 0 in a backend's backward, got {self.q_start}. "
                "Use corecontext.ops.fetch.query_blocks.attend_backward for later queries."
            )


class Groups(NamedTuple):
    """Hold the tokens that pooling reads, by group."""

    q_last: Tensor
    """The query of each group's last token, [N, r, M, D]."""
    k: Tensor
    """[N, M, g, D], rotary applied."""
    v: Tensor
    """[N, M, g, D]."""


class Cores(NamedTuple):
    """Hold core tokens, or their gradients."""

    k: Tensor
    """[N, 1, M, D]."""
    v: Tensor
    """[N, 1, M, D]."""


class Upstream(NamedTuple):
    """Hold the results of a forward and their gradients, for its backward."""

    grad_out: Tensor
    """[N, r, T, D]."""
    grad_lse: Tensor | None
    """[N, r, T], or None for zeros."""
    out: Tensor
    """[N, r, T, D]."""
    lse: Tensor
    """[N, r, T], natural, in float32 or wider."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Upstream:
        """Apply a function to each tensor."""
        return Upstream(*(None if x is None else function(x) for x in self))

    def rows(self, rows: slice) -> Upstream:
        """Return the results of some queries."""
        return self.map(lambda x: x[:, :, rows])


class FetchSlots(NamedTuple):
    """Hold recently fetched groups of raw tokens in host memory (`cache.host_slots`)."""

    keys: Tensor
    """[B, Hkv, slots, g, D]."""
    values: Tensor
    """As keys."""
    table: Tensor
    """The slot of each group, [B, Hkv, M + 1] in int32, -1 for none; the last is for no group."""
    owner: Tensor
    """The group of each slot, [B, Hkv, slots] in int32, -1 for none."""
    last_used: Tensor
    """The step that last read each slot, [B, Hkv, slots] in int64."""
    counts: Tensor
    """Steps, groups found in a slot and groups read so far, [B, Hkv, 3] in int64."""


class RawSlots(NamedTuple):
    """Hold the raw tokens and the index in low bits beside a compact cache, which a decoding step
    with fetch reads and writes."""

    keys: Tensor
    """[B, Hkv, S, D], the token at position p in slot p."""
    values: Tensor
    """As keys."""
    codes: Tensor
    """The index's keys, [B, Hkv, M, P ceil(D bits / 8)] in uint8, 8 / bits codes a byte."""
    scales: Tensor
    """In float16 [B, Hkv, M, P], or [B, Hkv, M, 1] where the index has one scale for a group."""
    centre: Tensor
    """Mean of the first keys, taken from all before they are rounded, [B, Hkv, D] in float32."""
    rotations: tuple[Tensor, Tensor]
    """The orthogonal matrix [D, D], no rotary one, that the index multiplies keys with before it
    rounds them: in the dtype of queries as [8 / bits, D, ceil(D bits / 8)], its columns by the
    place of their codes in a byte (`low_bits.columns_of_codes`), and its signs, [D, D] in bfloat16
    (`low_bits.rotation_signs`)."""
    slots: FetchSlots | None = None
    """Copies of fetched groups on the device, which a step reads where keys are in host memory."""


class Slots(NamedTuple):
    """Hold the buffers of a compact cache that a decoding step reads and writes."""

    keys: Tensor
    """[B, Hkv, ring_size + n + M, D], contiguous: the ring, with the token at position p in slot
    p mod ring_size, then the first n tokens, then the core token of each later group."""
    values: Tensor
    """As keys."""
    seen: int | Tensor
    """Tokens appended so far, padding included; a captured step counts in a 0-dim int64 tensor."""
    pad: Tensor
    """[B] in int64, tokens of left padding."""
    ring_size: int
    """At least s + g - 1."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines and sines, [g, R / 2] in float32, that rotate a group's tokens to its middle; rotary
    rotates R columns of a key. None pools keys as they are."""
    key_scales: Tensor | None = None
    """[B, Hkv, ring_size + n + M, 1] in float32, where keys are codes in 8 bits."""
    value_scales: Tensor | None = None
    """As key_scales."""
    cache_dtype: str = "auto"
    """The kind of codes, one of `config.CACHE_DTYPES`; "auto" for none."""
    masses: Tensor | None = None
    """Of core tokens, [B, Hkv, ring_size + n + M, 1] in float32; None for none."""
    raw: RawSlots | None = None
    """Raw tokens and index, for fetch."""
