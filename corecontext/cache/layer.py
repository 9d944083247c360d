"""The compact cache: core tokens of the far past and a ring of recent tokens, L // g + s + g - 1
entries a layer.

One buffer per layer holds the ring first and the core tokens behind it, so that a decoding step
attends to one contiguous slice; order does not matter to softmax and rotary is already in the keys.
Entries are found by position, never stored: the token at position p lies in ring slot p mod C, the
core token of group c in core slot c. Left padding (rows that close groups at different steps),
cropping and fixed shapes all follow from that.

In 8 bits (`CCAConfig.cache_dtype`) scales lie beside codes. A token is rounded when it comes, and
attended to and pooled as it was rounded, in whatever chunks it came: so all ways of appending still
agree.

First tokens kept raw (`CCAConfig.sink_size`) lie between ring and core tokens, the token at
position p < n in slot C + p. They never enter the ring, and the core tokens behind them are those
of later groups.

The file is long because appending, decoding, cropping and saving share one invariant: what each
slot holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.cache.eight_bit import decode, encode
from corecontext.cache.slots import grown, read, stretch, write
from corecontext.config import CCAConfig
from corecontext.ops import rules
from corecontext.ops.api import attend, backend_module, choose_backend, outside_autocast
from corecontext.ops.attend_buffer import attend_buffer
from corecontext.ops.batch import find_segments
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Cores, Groups, Inputs, Ragged, Slots, Spec, Tokens
from corecontext.visibility import (
    group_size_for,
    local_start,
    num_complete_groups,
    num_sinks,
    num_visible_cores,
    visible_cores_of,
    window_capacity,
)

UNDO_LIMIT = 256  # longest append, in tokens, that can be cropped away beyond `rollback`


class _Undo(NamedTuple):
    """What the last append pushed out of the ring."""

    start: int
    lost: list[Tensor]
    """As the buffers hold it."""
    intact_from: int


class CompactLayer:
    """Keys and values of one layer: a ring of the last s + g - 1 (+ rollback) tokens, the first n,
    every core token.

    Args:
        config: What to compute; `num_groups` fixes the group size by the first append.
        rotary: The keys' rotation, for core_position="middle".
        max_length: Longest sequence, in tokens; allocates once, keeps its length in a tensor and
            never moves its buffers, so that a decoding step can be compiled or captured. None grows
            geometrically.
        rollback: Extra ring tokens, so that `crop` can take back this many tokens however they were
            appended.
        learned: The layer's learned parameters, as in `cca_attention`; read at every call.
    """

    def __init__(
        self,
        config: CCAConfig,
        rotary: Rotary | None = None,
        *,
        max_length: int | None = None,
        rollback: int = 0,
        learned: rules.Learned | None = None,
    ) -> None:
        if rollback < 0:
            raise ValueError(f"rollback must be at least 0, got {rollback}.")
        if config.core_position == "middle" and rotary is None:
            raise ValueError(
                "rotary must be given for core_position='middle', got None. "
                "Pass rotary=Rotary.from_theta(theta, head_dim), or core_position='token'."
            )
        if config.head_group_sizes is not None:
            raise ValueError(
                "heads of different group sizes need a cache of several parts. Use cache.new_layer."
            )
        self.config, self.max_length, self.rollback = config, max_length, rollback
        self.rotary = rotary if config.core_position == "middle" else None
        self.learned = learned or {}
        self.group_size = config.group_size
        self.keys: Tensor | None = (
            None  # [B, Hkv, C + n + M w, D]; w = 1, or r for core_heads="query"
        )
        self.values: Tensor | None = None
        self.key_scales: Tensor | None = None  # [B, Hkv, C + n + M w, 1] beside codes in 8 bits
        self.value_scales: Tensor | None = None
        self._dtype: torch.dtype | None = None  # of the keys that came
        self.pad: Tensor | None = None  # [B], slots of left padding
        self.pads: list[int] = []  # the same on the host
        self.padding_known = True  # False while a row is nothing but padding: more of it may follow
        self.seen: int | Tensor = 0  # slots appended so far, padding included
        self.is_empty = True
        self._expected: int | None = None
        self._core_width = 1
        self._step: Callable[..., Tensor] | None = (
            None  # all of `_decode` at once, where the backend has that
        )
        self._turn: tuple[Tensor, Tensor] | None = None  # its tables
        self._intact_from = 0  # oldest slot whose token is surely still in the ring
        self._undo: _Undo | None = None
        self._ended: str | None = None  # why nothing may be appended any more

    # Sizes
    # -----------------------------------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        """Slots appended so far, padding included."""
        if self.is_empty:
            return 0
        return int(self.seen) if self._expected is None else self._expected

    def expect(self, seq_len: int) -> None:
        """Say what `seq_len` is before the next append of several tokens, which then need not ask
        the device."""
        self._expected = seq_len

    @property
    def ring_size(self) -> int:
        """Raw tokens kept: C = s + g - 1 + rollback."""
        # planted: 4: the ring is one token too short
        return window_capacity(self.group_size, self.config.window_size) + self.rollback

    @property
    def num_sinks(self) -> int:
        """First tokens that stay raw: n."""
        return num_sinks(self.config.sink_size, self.group_size)

    @property
    def raw_size(self) -> int:
        """Entries before the core tokens: C + n."""
        return self.ring_size + self.num_sinks

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of all rows and heads, keys and values, measured on the buffers."""
        return sum(x[:, :, :1].numel() * x.element_size() for x in self.buffers)

    @property
    def nbytes(self) -> int:
        """Bytes in use: the ring, the first tokens and the complete groups' core tokens."""
        return (
            (self.raw_size + self._num_cores() * self._core_width) * self.entry_bytes
            if self.buffers
            else 0
        )

    @property
    def raw_bytes(self) -> int:
        """Of those the ring and the first tokens, which do not grow."""
        return self.raw_size * self.entry_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of everything that this layer holds on to."""
        return sum(
            x.untyped_storage().nbytes()
            for x in (*self.buffers, *(self._undo.lost if self._undo else ()))
        )

    def _num_cores(self) -> int:
        """Core tokens of the longest row."""
        return self._cores_of(self.seq_len - min(self.pads, default=0))

    def _cores_of(self, length: int) -> int:
        """Core tokens of a row of so many tokens."""
        return num_complete_groups(length - self.num_sinks, self.group_size)

    # What lies in the buffers
    # ----------------------------------------------------------------------------------

    @property
    def buffers(self) -> list[Tensor]:
        """Keys and values, and in 8 bits their scales; [] before the first append."""
        return [
            x for x in (self.keys, self.values, self.key_scales, self.value_scales) if x is not None
        ]

    def hold(self, buffers: list[Tensor]) -> None:
        """Take these for the buffers."""
        self.keys, self.values, self.key_scales, self.value_scales = [
            *buffers,
            *[None] * (4 - len(buffers)),
        ]

    def _stored(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Keys and values as the buffers hold them."""
        kind = self.config.cache_dtype
        if kind == "auto":
            return [k, v]
        (k, k_scale), (v, v_scale) = encode(k, kind), encode(v, kind)
        return [k, v, k_scale, v_scale]

    def _loaded(self, parts: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """The inverse of `_stored`."""
        kind = self.config.cache_dtype
        if kind == "auto":
            return parts
        return [decode(codes, scale, kind, dtype) for codes, scale in zip(parts[:2], parts[2:])]

    # Appending
    # -------------------------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Append n new tokens and attend from them to everything so far (docs/math.md, eq. 5).

        Args:
            q: [B, H, n, D], rotary applied. k, v: [B, Hkv, n, D].
            attention_mask: [B, tokens so far + n], 0 for left padding; may be left out once every
                row has a token (`padding_known`).
            scale, softcap: As in `cca_attention`.

        Returns:
            [B, H, n, D], 0 at padding. Differentiable only for the first append, when nothing is
            cached yet; gradients are those of tokens that were not rounded to 8 bits.

        Raises:
            ValueError: the cache is full, the batch changes, the padding is not on the left or not
                given, g would change, or gradients would have to reach cached tokens.
        """
        if attention_mask is None and not self.padding_known:
            raise ValueError(
                "attention_mask must be given as long as a row has only padding, got None: the next token "
                "of that row may be padding, too."
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        (q, k, v), context = outside_autocast(q, k, v)
        with context:
            if not self.is_empty and q.shape[2] == 1 and attention_mask is None:
                return self._decode(q, k, v, scale, softcap)
            return self._append(q, k, v, attention_mask, scale, softcap)

    @torch.compiler.disable
    def _append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Any number of tokens at once: the first prefill, a chunk of it, a second turn, a draft to
        verify."""
        # planted: 4: an expected length is used twice
        start, new, self._expected = self.seq_len, q.shape[2], None
        needs_grad = torch.is_grad_enabled() and any(
            x.requires_grad for x in (q, k, v, *self.learned.values())
        )
        if needs_grad and start:
            raise ValueError(
                "gradients must not be asked through a filled compact cache: its core tokens are kept "
                "without their graph. Train with use_cache=False, or wrap generation in torch.no_grad()."
            )
        with torch.no_grad():
            ends = self._read_padding(attention_mask, q.shape[0], start, new, q.device)
            if self.is_empty:
                rules.check(self.learned, q.shape[1], k.shape[1], k.shape[3])
                self._start(q, k, attention_mask)
            self._reserve(start + new)
            stored = self._stored(k, v)
            self._remember(stored, start, new)
            kept_k, kept_v = self._loaded(stored, k.dtype)
            out = None
            for rows, pad in self._row_groups():
                first, last = max(0, pad - start), ends[rows.start]
                if first < last:
                    part = self._append_rows(
                        rows,
                        q,
                        kept_k,
                        kept_v,
                        stored,
                        first,
                        last,
                        max(0, start - pad),
                        scale,
                        softcap,
                        needs_grad,
                    )
                    if part is None or part.shape == q.shape:
                        out = part
                    else:
                        out = q.new_zeros(q.shape) if out is None else out
                        out[rows, :, first:last] = part
            self._advance(new)
            self._note_padding(start + new)
            self._intact_from = max(self._intact_from, start + new - self.ring_size)
        if needs_grad:
            spec = self._spec(scale, softcap)
            inputs = Inputs(q, k, v, self.config.core_bias, self.learned)
            # planted: sinks: lost when the first append is differentiated
            out, _ = attend(inputs, spec, Ragged(attention_mask), self.config.backend)
        return q.new_zeros(q.shape) if out is None else out

    def _append_rows(
        self,
        rows: slice,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        stored: list[Tensor],
        first: int,
        last: int,
        position: int,
        scale: float,
        softcap: float | None,
        store_only: bool,
    ) -> Tensor | None:
        """Rows that share their padding: pool the groups that close, keep what later queries need,
        attend unless they are only to be stored."""
        g, s, n, width = self.group_size, self.config.window_size, self.num_sinks, self._core_width
        ring, raw, heads, dim = self.ring_size, self.raw_size, k.shape[1], k.shape[3]
        module = backend_module(self.config.backend, q)
        count = last - first
        q = q[rows, :, first:last].reshape(-1, q.shape[1] // heads, count, dim)
        k, v = (x[rows, :, first:last].reshape(-1, count, dim) for x in (k, v))
        among = max(0, min(n - position, count))  # new tokens that are first ones and stay raw
        if among:
            for cached, x in zip(self.buffers, stored):
                cached[rows, :, ring + position : ring + position + among] = x[
                    rows, :, first : first + among
                ].to(cached.dtype)
        start, end = (
            max(0, position - n),
            max(0, position + count - n),
        )  # of the other new ones, counted from n
        low = local_start(start, g, s)
        raw_k, raw_v = k[:, among:], v[:, among:]
        if low < start:
            past = zip(*(stretch(x, rows, n + low, n + start, ring) for x in self.buffers))
            old_k, old_v = zip(*(self._loaded(list(parts), k.dtype) for parts in past))
            raw_k, raw_v = (
                torch.cat([*(part.flatten(0, 1) for part in old), x], 1)
                for old, x in ((old_k, raw_k), (old_v, raw_v))
            )
        old, total = num_complete_groups(start, g), num_complete_groups(end, g)
        if total > old:
            ends = slice(among + old * g + g - 1 - start, among + total * g - start, g)
            grouped = (
                x[:, old * g - low : total * g - low].unflatten(1, (total - old, g))
                for x in (raw_k, raw_v)
            )
            cores = self._pool(q[:, :, ends], *grouped, scale, softcap)
            for cached, core in zip(
                self.buffers, self._stored(*cores)
            ):  # core [N, w, new groups, D or 1]
                core = core.transpose(1, 2).reshape(
                    -1, heads, (total - old) * width, core.shape[-1]
                )
                cached[rows, :, raw + old * width : raw + total * width] = core.to(cached.dtype)
        kept = min(end - start, ring)
        for cached, x in zip(self.buffers, stored):
            begin = last - kept
            for part in stretch(cached, rows, n + end - kept, n + end, ring):
                part.copy_(x[rows, :, begin : begin + part.shape[2]])
                begin += part.shape[2]
        if store_only:
            return None
        # planted: 4: plain attention for a prompt one token too long
        if (
            position == 0 and softcap is None and num_visible_cores(end - 1, g, s) == 0
        ):  # nothing is compressed yet
            return F.scaled_dot_product_attention(
                q.reshape(-1, heads * q.shape[1], count, dim),
                k.reshape(-1, heads, count, dim),
                v.reshape(-1, heads, count, dim),
                is_causal=True,
                scale=scale,
                enable_gqa=q.shape[1] > 1,
            )
        cores = self._loaded([x[rows, :, raw : raw + total * width] for x in self.buffers], k.dtype)
        core_k, core_v = (
            x.unflatten(2, (total, width)).transpose(2, 3).flatten(0, 1) for x in cores
        )  # [N, w, M, D]
        bias = self._core_bias(q.dtype)
        if isinstance(bias, Tensor):
            bias = bias.reshape(heads, -1).repeat(q.shape[0] // heads, 1)
        elif bias:
            bias = q.new_full(q.shape[:2], bias, dtype=torch.promote_types(q.dtype, torch.float32))
        else:
            bias = None
        tokens = Tokens(q, raw_k, raw_v, position, n + low)
        if n:
            held = self._loaded(
                [x[rows, :, ring : ring + min(n, position + count)] for x in self.buffers], k.dtype
            )
            sink_k, sink_v = (x.flatten(0, 1) for x in held)
            tokens = tokens._replace(sink_k=sink_k, sink_v=sink_v)
        out, _ = module.attend(tokens, Cores(core_k, core_v), self._spec(scale, softcap), bias)
        return out.reshape(-1, heads * q.shape[1], count, dim).to(q.dtype)

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """One token per row, in tensor arithmetic only: this is what is compiled or captured."""
        self._check_open()
        if q.shape[0] != len(self.pads):
            raise ValueError(f"the batch must keep its {len(self.pads)} rows, got {q.shape[0]}.")
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise ValueError(
                "gradients must not be asked through a filled compact cache: its core tokens are kept "
                "without their graph. Train with use_cache=False, or wrap generation in torch.no_grad()."
            )
        g, s, n, width = self.group_size, self.config.window_size, self.num_sinks, self._core_width
        ring, raw, fixed = self.ring_size, self.raw_size, self.max_length is not None
        if not fixed:
            self._reserve(self.seen + 1)
            self._undo = None
            self._intact_from = max(self._intact_from, self.seen + 1 - ring)
        if self._step is not None:
            slots = Slots(
                self.keys,
                self.values,
                self.seen,
                self.pad,
                ring,
                self._turn,
                self.key_scales,
                self.value_scales,
                self.config.cache_dtype,
            )
            spec = self._spec(scale, softcap)
            out = self._step(q, k, v, slots, spec, self.config.core_bias)
            if not fixed:  # a tensor is counted on the device
                self.seen += 1
            return out
        position = self.seen - self.pad  # [B]
        target = position % ring
        if n:
            # planted: sinks: decoding puts them into the ring
            target = torch.where((position >= 0) & (position < n), ring + position, target)
        for cached, x in zip(self.buffers, self._stored(k, v)):
            write(cached, target[:, None], x)
        # planted: 4: decoding never pools
        if fixed or any((self.seen - pad) % g == g - 1 for pad in self.pads):
            self._close_groups(q, position, scale, softcap)
        cores = (
            (self.keys.shape[2] - raw) // width
            if fixed
            else self._cores_of(self.seen + 1 - min(self.pads))
        )
        self._advance(1)
        slot = torch.arange(ring, device=q.device)
        # planted: 4: decoding sees one core token too few
        visible = visible_cores_of(position - n if n else position, g, s)[:, None]  # [B, 1]
        held = (
            position[:, None] - (position[:, None] - slot) % ring
        )  # position of the token in each ring slot
        see_core = (torch.arange(cores, device=q.device) < visible)[
            :, None, :, None
        ]  # [B, 1, M, 1]
        if width > 1:  # query head i sees the core tokens made for it
            own = torch.eye(width, dtype=torch.bool, device=q.device)[:, None]  # [w, 1, w]
            see_core = see_core & own
        see_raw = held >= visible * g
        if n:  # the first tokens so far, and of the ring those behind them
            # planted: sinks: decoding sees those to come
            see_first = torch.arange(n, device=q.device) <= position[:, None]
            # planted: sinks: decoding sees the ring's old slots
            see_raw = torch.cat((held >= visible * g + n, see_first), -1)
        see = torch.cat(
            (see_raw[:, None].expand(-1, see_core.shape[1], -1), see_core.flatten(2)), -1
        )
        keys, values = self._loaded([x[:, :, : raw + cores * width] for x in self.buffers], q.dtype)
        # planted: sinks: core bias added to them
        return attend_buffer(
            q,
            keys,
            values,
            see,
            raw,
            scale=scale,
            softcap=softcap,
            core_bias=self._core_bias(q.dtype),
        )

    def _core_bias(self, dtype: torch.dtype) -> float | Tensor:
        """What is added to core scores: a number, or [H] in float32 or wider."""
        if "bias" not in self.learned:
            return self.config.core_bias
        return (
            self.learned["bias"].to(torch.promote_types(dtype, torch.float32))
            + self.config.core_bias
        )

    def _pool(
        self, q_last: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Core tokens [N, w, M, D] of groups [N, M, g, D], by the backend or by a rule of its
        own."""
        groups, spec = Groups(q_last, k, v), self._spec(scale, softcap)
        if not rules.is_own_rule(self.config.pooling, self.learned):
            return backend_module(self.config.backend, q_last).pool(groups, spec)
        heads = self.keys.shape[1]
        return rules.pool(groups, spec, rules.by_sequence(self.learned, heads, k.shape[0] // heads))

    def _spec(self, scale: float, softcap: float | None) -> Spec:
        """The settings of a call, with the group size that the first append fixed."""
        spec = Spec.of(self.config, self.rotary, scale, softcap)
        return spec.replace(group_size=self.group_size, num_groups=None)

    def _close_groups(
        self, q: Tensor, position: Tensor, scale: float, softcap: float | None
    ) -> None:
        """Pool the group of every row whose newest token is a group's last; other rows keep what
        they have."""
        g, n, ring, width = self.group_size, self.num_sinks, self.ring_size, self._core_width
        batch, heads, _, dim = self.keys.shape
        inside = torch.arange(g, device=q.device)
        slots = ((position // g * g)[:, None] + inside) % ring  # [B, g]
        tokens = self._loaded([read(x, slots) for x in self.buffers], q.dtype)
        grouped = (x.flatten(0, 1)[:, None] for x in tokens)  # [N, 1, g, D]
        q_last = q.reshape(batch * heads, -1, 1, dim)
        cores = self._pool(q_last, *grouped, scale, softcap)
        last_core = (self.keys.shape[2] - self.raw_size) // width - 1
        if last_core < 0:
            return
        # planted: 4: every row closes its group with the first row
        closes = ((position + 1) % g == 0)[:, None, None, None]
        # What groups of first tokens leave in core slot 0 is written over before it is seen.
        # planted: sinks: a core token in another's slot
        core = (position - n if n else position) // g
        target = (
            self.raw_size
            + core.clamp(0, last_core)[:, None] * width
            + torch.arange(width, device=q.device)
        )
        for cached, core in zip(self.buffers, self._stored(*cores)):
            core = core.reshape(batch, heads, width, core.shape[-1]).to(cached.dtype)
            write(cached, target, torch.where(closes, core, read(cached, target)))

    # Bookkeeping
    # -----------------------------------------------------------------------------------------------

    def _start(self, q: Tensor, k: Tensor, attention_mask: Tensor | None) -> None:
        """Fix the group size and allocate."""
        c = self.config
        if c.num_groups is not None:
            if len(set(self.pads)) > 1:
                raise ValueError(
                    "num_groups must be used with rows of one length, got different padding. "
                    "Set group_size, or run the rows one by one."
                )
            self.group_size = group_size_for(q.shape[2] - self.pads[0], c.window_size, c.num_groups)
        self._core_width = q.shape[1] // k.shape[1] if c.core_heads == "query" else 1
        cores = 0 if self.max_length is None else self._cores_of(self.max_length)
        shape = (k.shape[0], k.shape[1], self.raw_size + cores * self._core_width)
        like, self._dtype = self._stored(k[:, :, :1], k[:, :, :1]), k.dtype
        if [(x.shape, x.dtype, x.device) for x in self.buffers] != [
            ((*shape, x.shape[3]), x.dtype, x.device) for x in like
        ]:
            # Zeros, not garbage: a masked NaN would still reach the output as 0 x NaN.
            self.hold([x.new_zeros(*shape, x.shape[3]) for x in like])
            if self.max_length is not None:
                self.seen = torch.zeros((), dtype=torch.long, device=k.device)
                for fixed in (*self.buffers, self.seen, self.pad):
                    torch._dynamo.mark_static_address(fixed)
        self._choose_step()
        self.is_empty = False

    def adopt(self, buffers: list[Tensor], like: CompactLayer) -> None:
        """Decode into these buffers from now on, [B, Hkv, C + n + M w, D or 1], laid out as those
        of another cache (a pool)."""
        self.hold(buffers)
        self.group_size, self._core_width, self._dtype = (
            like.group_size,
            like._core_width,
            like._dtype,
        )
        self.is_empty = False
        self._choose_step()

    def _choose_step(self) -> None:
        """Find what decodes into the buffers as they are now: their dtype and device decide."""
        self._step = None
        if self.learned or rules.is_own_rule(self.config.pooling, None):
            return  # a fused step has the paper's pooling and one bias for all heads
        if (
            choose_backend(
                self.config.backend,
                self.keys.new_empty(1, 1, 1, self.keys.shape[3], dtype=self._dtype),
            )
            == "triton"
        ):
            module, half = (
                backend_module("triton", self.keys),
                self.rotary and self.rotary.inv_freq.numel(),
            )
            self._step = module.decode_step
            table = self._turn and self._turn[0]
            # Kept where it lies as long as it is right: a captured step reads it there.
            if half and (
                table is None
                or table.shape != (self.group_size, half)
                or table.device != self.keys.device
            ):
                self._turn = module.turn_tables(self.rotary, self.group_size, self.keys.device)

    def _read_padding(
        self, mask: Tensor | None, batch: int, start: int, new: int, device: torch.device
    ) -> list[int]:
        """Take over the padding; returns where each row's new tokens end."""
        self._check_open()
        before = self.pads
        if self.is_empty:
            before = self.pads = [0] * batch  # as the tensor says, if it is there
        elif batch != len(self.pads):
            raise ValueError(f"the batch must keep its {len(self.pads)} rows, got {batch}.")
        elif self.config.num_groups is not None and new > 1:
            raise ValueError(
                "num_groups must get the whole prompt in one call, got more tokens on a filled cache: "
                "g follows from the prompt's length. Set group_size instead."
            )
        ends = [new] * batch
        if mask is not None:
            if mask.shape[-1] == new and start:  # a mask of the new tokens only
                mask = torch.cat(
                    (torch.arange(start, device=mask.device) >= self.pad[:, None], mask.bool()), 1
                )
            pads, stops = [start + new] * batch, [start + new] * batch
            for segment in find_segments(batch, start + new, mask):
                for row in range(segment.first_row, segment.last_row):
                    pads[row], stops[row] = segment.start, segment.end
            for row, (known, pad) in enumerate(zip(self.pads, pads)):
                # planted: 4: cached padding becomes tokens
                if min(known, start) != min(pad, start):
                    raise ValueError(
                        f"attention_mask must keep the padding of the cached tokens: row {row} has "
                        f"{known} padded tokens, got {pad}."
                    )
            self.pads, ends = pads, [stop - start for stop in stops]
            if any(stop < start + new for stop in stops):
                self.close("a batch padded on the right")
        if self.pad is None or len(self.pad) != batch:
            self.pad = torch.zeros(batch, dtype=torch.long, device=device)
            before = [0] * batch
        if self.pads != before:  # in place: a captured decoding step reads it where it lies
            self.pad.copy_(torch.tensor(self.pads, device=device))
        return ends

    def _note_padding(self, length: int) -> None:
        """Find whether every row has a token; on the host, so that a decoding step need not ask the
        device."""
        # planted: 4: a row of nothing but padding passes for known
        self.padding_known = all(pad < length for pad in self.pads if pad)

    def close(self, what: str) -> None:
        """Let nothing be appended any more, because `what` was cached."""
        self._ended = what

    def _check_open(self) -> None:
        if self._ended:
            raise ValueError(
                f"a cache must not be continued after {self._ended}. Pad on the left, one sequence a row."
            )

    def _row_groups(self) -> Iterator[tuple[slice, int]]:
        """All rows at once where they share their padding and end, else one by one."""
        if len(set(self.pads)) == 1 and not self._ended:
            yield slice(0, len(self.pads)), self.pads[0]
        else:
            for row, pad in enumerate(self.pads):
                yield slice(row, row + 1), pad

    def _reserve(self, length: int) -> None:
        """Make room for the core tokens of `length` slots: fixed, or a quarter more than now at
        least."""
        if self.max_length is not None:
            if length > self.max_length:
                raise ValueError(
                    f"the compact cache must hold at most max_length {self.max_length} tokens, got "
                    f"{length}. Make it with a larger max_length."
                )
            return
        needed = self._cores_of(length - min(self.pads)) * self._core_width
        room = self.keys.shape[2] - self.raw_size
        if needed > room:
            room = max(needed, room + max(16, room // 4)) if room else needed
            self.hold([grown(x, self.raw_size + room) for x in self.buffers])

    def _remember(self, stored: list[Tensor], start: int, new: int) -> None:
        """Keep what a short append pushes out of the ring, so that a rejected draft can be cropped
        away."""
        self._undo = None
        ring = self.ring_size
        if start and start + new > ring and new <= UNDO_LIMIT and self.max_length is None:
            slots = (
                start - self.pad[:, None] + torch.arange(min(new, ring), device=self.pad.device)
            ) % ring
            lost = [
                torch.cat((read(cached, slots), x[:, :, : max(0, new - ring)]), 2)
                for cached, x in zip(self.buffers, stored)
            ]
            self._undo = _Undo(start, lost, self._intact_from)

    def _advance(self, new: int) -> None:
        """Count new slots, in place where the length is a tensor."""
        if isinstance(self.seen, Tensor):
            self.seen.add_(new)
        else:
            self.seen += new

    def crop(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` tokens, exactly.

        Possible while all raw tokens that the next query sees are still at hand: always within the
        last append to a filled cache, if that had at most UNDO_LIMIT tokens, and `rollback` tokens
        beyond, counted from the longest the sequence ever was.

        Raises:
            ValueError: fewer tokens are cached, or what the next query needs has left the ring.
        """
        end, undo = self.seq_len, self._undo
        base, intact_from = self.check_crop(num_tokens)
        if num_tokens == 0:
            return
        self._expected = None
        if undo is not None:
            kept, count = base - undo.start, min(end - base, self.ring_size)
            slots = (
                base - self.pad[:, None] + torch.arange(count, device=self.pad.device)
            ) % self.ring_size
            for cached, lost in zip(self.buffers, undo.lost):
                # planted: 4: a rejected draft stays in the ring
                write(cached, slots, lost[:, :, kept : kept + count])
            self._undo = undo._replace(lost=[x[:, :, :kept] for x in undo.lost]) if kept else None
        self._intact_from = intact_from
        self._advance(-num_tokens)
        self._note_padding(end - num_tokens)

    def check_crop(self, num_tokens: int) -> tuple[int, int]:
        """Raise where `crop` would; else the slot from which the last append is to be undone, and
        the oldest slot whose token the ring then has."""
        end, undo = self.seq_len, self._undo
        if not 0 <= num_tokens <= end:
            raise ValueError(f"crop must take back 0 to {end} tokens, got {num_tokens}.")
        left = end - num_tokens
        # Undoing the last append, as far as needed, brings back what it pushed out of the ring.
        base = left if undo is None else max(left, undo.start)
        # Steps on a cache of fixed length do not count on the host what they push out: all before
        # the ring's beginning.
        known, furthest = (self._intact_from, end) if undo is None else (undo.intact_from, base)
        intact_from = max(known, furthest - self.ring_size)
        # Rows of first tokens only need nothing of the ring.
        n, g, s = self.num_sinks, self.group_size, self.config.window_size
        needed = min(
            (pad + n + local_start(left - pad - n, g, s) for pad in self.pads if left > pad + n),
            default=None,
        )
        if num_tokens and needed is not None and needed < intact_from:
            raise ValueError(
                f"crop must leave the window whole, got {num_tokens} tokens to take back from a cache "
                f"made with rollback={self.rollback}. Give it a larger rollback."
            )
        return base, 0 if needed is None else intact_from

    def shrink_window(self, window_size: int) -> None:
        """Let all later queries see only the nearest `window_size` tokens uncompressed, and free
        the rest of the ring.

        Exact: a group is pooled as soon as it closes, so the core tokens of what leaves the window
        exist already. Makes smaller buffers and copies what stays into them, so a step that was
        captured must be captured again.

        Args:
            window_size: The new s, in tokens, at most the present one.

        Raises:
            ValueError: larger than now (the tokens are gone), or less than 1.
        """
        config = self.config.replace(window_size=window_size)
        if window_size > self.config.window_size:
            raise ValueError(
                f"window_size must be at most {self.config.window_size} once set, got {window_size}. "
                "Start a new cache for a larger window."
            )
        old_ring, self.config = self.ring_size, config
        ring = self.ring_size
        if self.keys is None or ring == old_ring:
            return
        self._intact_from, self._undo = max(self._intact_from, self.seq_len - ring), None
        # Positions of the tokens that stay; below 0 in short rows, whose entries no query sees.
        kept = (self.seen - self.pad)[:, None] + torch.arange(-ring, 0, device=self.pad.device)
        shrunk = []
        for cached in self.buffers:
            smaller = cached.new_empty(
                *cached.shape[:2], cached.shape[2] - old_ring + ring, cached.shape[3]
            )
            # planted: inference: a smaller ring filled by old slots
            write(smaller, kept % ring, read(cached, kept % old_ring))
            smaller[:, :, ring:] = cached[:, :, old_ring:]
            shrunk.append(smaller)
        self.hold(shrunk)
        if self.max_length is not None:
            for fixed in shrunk:
                torch._dynamo.mark_static_address(fixed)

    def _each_tensor(self, change) -> None:
        """Apply a change of the batch dimension to everything held."""
        if self.keys is None:
            return
        # planted: 4: beams keep the ring of another
        self.hold([change(x) for x in self.buffers])
        self.pad = change(self.pad)
        self.pads = self.pad.tolist()
        self._note_padding(self.seq_len)
        if self._undo is not None:
            self._undo = self._undo._replace(lost=[change(x) for x in self._undo.lost])

    def select(self, rows: Tensor) -> None:
        """Keep the given rows in the given order: beam search and dropping of finished rows."""
        self._each_tensor(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self, times: int) -> None:
        """Repeat each row, as `repeat_interleave`."""
        self._each_tensor(lambda x: x.repeat_interleave(times, 0))

    def reset(self) -> None:
        """Forget everything; buffers of fixed size stay where they are."""
        if self.max_length is None or self.keys is None:
            self.hold([])
            self.pad = None
            self.seen = 0
        else:
            for fixed in (*self.buffers, self.seen, self.pad):
                fixed.zero_()
        self.is_empty, self.pads, self._intact_from, self._undo, self._ended = (
            True,
            [],
            0,
            None,
            None,
        )
        self.padding_known = True

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue elsewhere; tensors are those in use, not copies."""
        used = self.raw_size + self._num_cores() * self._core_width
        keys, values, *scales = [x[:, :, :used] for x in self.buffers] or [None, None]
        return {
            "config": self.config.to_dict(),
            "rollback": self.rollback,
            "group_size": self.group_size,
            "core_width": self._core_width,
            "seen": self.seq_len,
            "intact_from": self._intact_from,
            "ended": self._ended,
            "pad": self.pad,
            "keys": keys,
            "values": values,
            "scales": scales,
            "dtype": self._dtype,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state made under the same configuration and rollback; copies its tensors."""
        if (
            CCAConfig.from_dict(state["config"]) != self.config
            or state["rollback"] != self.rollback
        ):
            raise ValueError(
                f"the state must come from a cache with config {self.config.to_dict()} and rollback "
                f"{self.rollback}, got {state['config']} and {state['rollback']}."
            )
        self.reset()
        if state["keys"] is None:
            return
        self.group_size, self._core_width = state["group_size"], state["core_width"]
        self.pads = state["pad"].tolist()
        size = state["keys"].shape[2]
        if self.max_length is not None:
            self._reserve(state["seen"])  # raises where it does not fit
            size = self.raw_size + self._cores_of(self.max_length) * self._core_width
        self.pad = state["pad"].clone()
        self.hold(
            [grown(x, size) for x in (state["keys"], state["values"], *state.get("scales", ()))]
        )
        self._dtype = state.get("dtype", state["keys"].dtype)
        self.seen = (
            state["seen"]
            if self.max_length is None
            else torch.tensor(state["seen"], device=self.pad.device)
        )
        self._intact_from, self._ended, self.is_empty = state["intact_from"], state["ended"], False
        self._note_padding(state["seen"])
        self._choose_step()
