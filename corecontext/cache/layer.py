"""Cache one layer's keys and values compactly: core tokens of the far past, a ring of recent
tokens, L // g + s + g - 1 entries for L tokens.

entries.py says which slot holds which token, state.py counts the tokens, cropping.py takes them
back, saving.py saves them. This file appends many tokens or one (a step), and shrinks the window;
over 400 lines, since all ways to append read and write the same state.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from corecontext.cache.append import (
    NewTokens,
    append_late,
    append_rows,
    new_tokens,
    put_newest,
    reading_by,
)
from corecontext.cache.cropping import UNDO_LIMIT
from corecontext.cache.decode_step import decode_step
from corecontext.cache.exact_step import close_in_store, exact_step
from corecontext.cache.host_slots import SlotStore
from corecontext.cache.late import Late
from corecontext.cache.raw_store import Newest
from corecontext.cache.saving import SavedState
from corecontext.cache.slots import read, write
from corecontext.cache.stores import has_own_memory
from corecontext.cache.unchanged import unchanged_by_errors, write_last
from corecontext.cache.whole_rows import WholeRows
from corecontext.ops.api import (
    AUTO_DTYPES,
    TRITON_DTYPES,
    attend,
    backend_module,
    choose_backend,
    outside_autocast,
)
from corecontext.ops.batch import find_segments
from corecontext.ops.fetch.prompt_rule import NO_END, Reading, most_read, reading_of
from corecontext.ops.spec import Inputs, Ragged, Slots
from corecontext.visibility import group_size_for

LEAST_RING = 4096
"""Slots that a growing cache gives its ring at first, if s and g ask for so many."""
LATE_TOKENS = 16384
"""Longest prompt whose raw tokens stay on the device until its core tokens are made."""
NO_GRADIENTS = (
    "gradients must not be asked through a filled compact cache: its core tokens are kept without "
    "their graph. Train with use_cache=False, or wrap generation in torch.no_grad()."
)


class CompactLayer(SavedState):
    """Keys and values of one layer: a ring of the last s + g - 1 (+ rollback) tokens, the sinks,
    and every core token.

    Args:
        config: Settings; with `num_groups` the length of the first append fixes the group size.
        rotary: The keys' rotation, for core_position="middle".
        max_length: Longest sequence, in tokens, of a fixed cache: its buffers are allocated once
            and never move, and its length is a tensor, so that a decoding step can be compiled or
            captured. None makes a growing cache.
        rollback: Tokens that `crop` can always take back, by as many extra slots of the ring.
        begins_on_device: Keep few raw tokens of a growing cache on the device, though the settings
            name host memory: steps read all of them in less time than they choose.
    """

    _step: Callable[..., Tensor] | None = None
    """The backend's fused decoding step, if it has one for the layer."""
    _refusal: Callable[..., str | None]
    """Returns why the fused step with fetch cannot read a store, or None where it can."""
    _tables: tuple[Tensor, Tensor] | None = None
    """Cosines and sines by which the fused step rotates the keys of a group to its middle."""

    # Appending

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_mask: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        is_prompt: bool = True,
    ) -> Tensor:
        """Append n new tokens and attend from them to all tokens so far, by CCA (docs/math.md,
        eq. 5) or, from a prompt's tokens, as `CCAConfig.prefill` says.

        Args:
            q: [B, H, n, D], rotary applied. k, v: [B, Hkv, n, D].
            attention_mask: [B, tokens so far + n], 0 for left padding; may be left out once every
                row has a token (`padding_known`).
            scale, softcap: As in `cca_attention`.
            is_prompt: False for a draft and for a text that is scored. A prompt ends with the first
                single token that `expect` has not announced: a step.

        Returns:
            [B, H, n, D], 0 at padding. Differentiable only for the first append, when nothing is
            cached yet; gradients are those of tokens that were not rounded to 8 bits.

        Raises:
            ValueError: the cache is full, the batch changes, the padding is not on the left or not
                given, g would change, or gradients would have to reach cached tokens.
        """
        if attention_mask is None and not self.padding_known:
            raise ValueError(
                "attention_mask must be given as long as a row has only padding, got None: the "
                "next token of that row may be padding, too."
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if (scale, softcap) != (self.spec.scale, self.spec.softcap):
            self.spec = self.spec.replace(scale=scale, softcap=softcap)
        (q, k, v), context = outside_autocast(q, k, v)
        with context:
            out = None
            if attention_mask is None and is_prompt and (self.is_empty or self.whole is not None):
                out = self._attend_whole(q, k, v)
            if out is not None:
                return out
            if self.whole is not None:
                self.grow_up(self.whole.length + q.shape[2])
            # mutant prefill: a last chunk of one token is a step
            is_step = q.shape[2] == 1 and attention_mask is None and self._expected is None
            if is_step and not self.is_empty:
                return self._decode((q, k, v), is_prompt)
            return self._append(q, k, v, attention_mask, is_prompt)

    def _attend_whole(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Append a prompt's tokens, or a step's, to rows that are whole (whole_rows.py), and attend
        from them; return None where there are too many tokens, or not all of them are read."""
        rows, _, count, _ = q.shape
        whole = self.whole
        if whole is None:
            whole = WholeRows(self._most_whole(q.device, rows))
        start = whole.length
        end = start + count
        is_step = count == 1 and start > 0 and self._expected is None
        if end > whole.most or self._closed or self.spec.softcap is not None:
            return None
        if whole.length and rows != len(self.pads):
            return None
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return None
        if is_step:
            out = whole.step(q, k, v, self.spec)
        else:
            # A short append to a filled cache may be a draft, which is cropped away.
            is_short = start > 0 and count <= UNDO_LIMIT
            reading = reading_of(self.config, q.device.type, is_prompt=True)
            if is_short or reading.full_until < end or self._planned > whole.most:
                return None
            out = whole.append(q, k, v, self.spec, self._planned)
        self.whole = whole
        self._expected = None
        self.is_late = True
        self.seen = self._counted = end
        if self.is_empty:
            self.is_empty = False
            self.dtype = k.dtype
            self.pads = [0] * rows
        return out

    @unchanged_by_errors
    def grow_up(self, length: int = 0) -> None:
        """Make the compact form of whole rows, with room for rows of `length` tokens; ring,
        core tokens and index stay late."""
        whole = self.whole
        assert whole is not None, "only rows that are whole grow up"
        self.whole = None
        self.is_late = False
        k, v = whole.tokens
        self._store_pads(k.device)
        self._start(k, max(length, whole.length))
        self._make_room(max(length, whole.length))
        for buffer, x in zip(self.store.raw, (k, v)):
            # mutant fetch: few tokens are lost where they get a compact form
            buffer[:, :, : whole.length] = x
        newest = None if self.store.is_near else Newest(0, [k, v])
        self.late = Late(whole.queries, whole.length, newest)
        self.is_late = True
        self.set_length(whole.length)
        self._oldest_in_ring = max(0, whole.appended - self.ring_size)

    @torch.compiler.disable
    @unchanged_by_errors
    def _append(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, is_prompt: bool
    ) -> Tensor:
        """Append any number of tokens: a prompt, a chunk of it, a second turn, a draft."""
        start = self.seq_len  # start .. end - 1 are the new tokens' places in a padded row
        end = start + q.shape[2]
        # mutant 4: an expected length is used twice
        self._expected = None
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if needs_grad and start:
            raise ValueError(NO_GRADIENTS)

        with torch.no_grad():
            # Padding, room and, with the first tokens, sizes and buffers.
            stops = self._take_padding(attention_mask, q.shape[0], start, end, q.device)
            if self.is_empty:
                self._start(k, end)
            if start == 0:
                self.begin_prompt(k)
            if not is_prompt:
                self.end_prompt()
            reading = reading_by(self, q.device.type, is_prompt)
            self._make_room(end)
            tokens = new_tokens(self, q, k, v)
            # Entries are made late or now. With gradients tokens are stored, and attended to below.
            if not needs_grad and self._defers(reading, start, end):
                out, self.late = append_late(self, tokens, start - self.pads[0], self.late)
                self.is_late = True
            else:
                self.catch_up()
                self._note_lost(start, tokens.stored)
                out = self._append_spans(tokens, start, stops, None if needs_grad else reading)
            self.set_length(end)
            # mutant 4: a chunk forgets the longest length
            self._oldest_in_ring = max(self._oldest_in_ring, end - self.ring_size)
        if not needs_grad:
            return q.new_zeros(q.shape) if out is None else out
        inputs = Inputs(q, k, v)
        spec = self.spec
        if reading.full_until == NO_END:
            spec = spec.of_full(end)
        # mutant sinks: lost when the first append is differentiated
        return attend(inputs, spec, Ragged(attention_mask), self.config.backend)[0]

    def _defers(self, reading: Reading, start: int, end: int) -> bool:
        """Whether tokens go to the store only, and their ring and core tokens come late: all of
        them see all raw tokens. A short append to a filled cache may be a draft that is cropped
        away, and is not put off."""
        # late.py pools tokens as they are stored: not as codes of 8 bits.
        if self.store is None or not self.config.fetch_groups or self.config.cache_dtype != "auto":
            return False
        # `Late` takes rows of one length, without padding among the new tokens.
        has_one_length = len(set(self.pads)) == 1 and self._counted is not None and not self._closed
        if not has_one_length or self.pads[0] > start or reading.full_until < end:
            return False
        # Where steps read all raw tokens, entries may stay late; else a prompt read at once is put
        # off up to `end_prompt`, where the core tokens of all layers are made together.
        if self.max_length is None and self._reads_all(end):
            return start == 0 or end - start > UNDO_LIMIT
        return start == 0 and end <= LATE_TOKENS

    def _append_spans(
        self, tokens: NewTokens, start: int, stops: list[int], reading: Reading | None
    ) -> Tensor | None:
        """Append rows that share their padding and end together at once, else row by row; row b has
        its new tokens in the places start .. stops[b] - 1, padding included. Return [B, H, n, D], 0
        at padding, or None where `reading` is None (tokens are only stored), or all is padding."""
        rows_at_once = 1
        if len(set(self.pads)) == 1 and not self._closed:
            rows_at_once = len(self.pads)
        out = None
        spans = []
        for row in range(0, len(self.pads), rows_at_once):
            rows = slice(row, row + rows_at_once)
            first = max(0, self.pads[row] - start)
            last = stops[row] - start
            if first >= last:
                continue  # only padding
            position = max(0, start - self.pads[row])
            spans.append((tokens.of(rows, first, last), rows, position))
            span_out = append_rows(self, *spans[-1], reading)
            if span_out is not None and span_out.shape == tokens.q.shape:
                out = span_out
            elif span_out is not None:
                out = tokens.q.new_zeros(tokens.q.shape) if out is None else out
                out[rows, :, first:last] = span_out
        # Last: it overwrites tokens that stay where another row fails.
        for span in spans:
            write_last(functools.partial(put_newest, self, *span))
        return out

    # Decoding

    def _decode(self, tokens: tuple[Tensor, Tensor, Tensor], may_read_all: bool) -> Tensor:
        """Append one token per row and attend from it: a step, which may be compiled or captured.
        `tokens` are q [B, H, 1, D], k and v [B, Hkv, 1, D]; `may_read_all` allows it to attend to
        all raw tokens instead of choosing."""
        q, k, v = tokens
        self._check_rows(q.shape[0])
        self.end_prompt()
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise ValueError(NO_GRADIENTS)
        is_fixed = self.max_length is not None
        host_counts = is_fixed and self._counts_steps()
        if host_counts:
            # mutant 4: a full cache of fixed length goes on
            self._make_room(self._counted + 1)
        if not is_fixed:
            self._make_room(self.seen + 1)
            self._undo = None
        # Whether the token may be a group's last. A fixed cache has its length on the device only:
        # each step may close groups, and looks at all of them.
        g = self.group_size
        closes = is_fixed and self.capacity > 0
        if not is_fixed:
            # mutant 4: decoding never pools
            closes = any((self.seen - pad) % g == g - 1 for pad in self.pads)
        # In one of three ways: to all raw tokens, by the fused kernel, in tensor arithmetic.
        kernel_counts = is_fixed and self._step is not None  # it adds 1 to `seen`, on the device
        if may_read_all and self._reads_all(self.max_length or self.seen + 1):
            out = exact_step(self, tokens, (self.seen, self.pad, self.pads))
            if closes:
                self._close_exactly(q)
            self.is_late = True
        elif (slots := self._slots()) is not None:
            out = self._step(q, k, v, slots, self.spec)
        else:
            num_cores = self.capacity
            if not is_fixed:
                num_cores = self.num_cores(self.seen + 1 - min(self.pads))
            position = self.seen - self.pad
            out = decode_step(self, tokens, position, num_cores=num_cores, closes=closes)
            kernel_counts = False
        if host_counts:
            self._counted += 1
        if not kernel_counts:
            self.seen += 1
        return out

    def _close_exactly(self, q: Tensor) -> None:
        """Close the groups that a step has filled in the store. Rows of one length only keep the
        query, so that `catch_up` pools many groups at once; other rows pool now."""
        has_one_length = isinstance(self.seen, int) and len(set(self.pads)) == 1
        if not has_one_length or self._counted is None:
            if self.late.queries:
                self.catch_up()
            close_in_store(self, q, self.seen - self.pad)
        elif self.seen - self.pads[0] >= self.num_sinks:
            self.late.queries.append(q.clone())
            self.late.length = self.seen + 1 - self.pads[0]

    def _reads_all(self, length: int) -> bool:
        """Whether a step on `length` tokens, padding included, attends to all raw tokens."""
        if self.store is None or not self.store.is_near or self.spec.softcap is not None:
            return False
        device = self.pad.device
        if self.max_length is not None and has_own_memory(device):  # its steps may be captured
            return False
        return length - min(self.pads) <= most_read(self.config, device.type)

    def _slots(self) -> Slots | None:
        """Return the buffers as the fused step takes them, None where there is no such step."""
        if self._step is None:
            return None
        raw = None
        if self.store is not None:
            raw = self.store.as_slots()
            if raw is None or self._refusal(self.spec, raw) is not None:
                return None
        return Slots(
            self.keys,
            self.values,
            self.seen,
            self.pad,
            self.ring_size,
            self._tables,
            *self.scales,
            self.config.cache_dtype,
            self.mass_buffer,
            raw,
        )

    @property
    def is_due(self) -> bool:
        """Whether the next step reads ring and core tokens, and they are late."""
        if self.whole is not None:
            return self.seen >= self.whole.most
        return self.is_late and not self._reads_all(self.max_length or self.seq_len + 1)

    @property
    def asks_device(self) -> bool:
        """Whether a step asks the device which groups have no slot: it cannot be captured."""
        return isinstance(self.store, SlotStore) and self._slots() is None

    def _choose_step(self) -> None:
        """Find the fused step for the buffers' dtype and device, if the backend has one."""
        self._step = None
        fetches = self.config.fetch_groups > 0
        if fetches and self.store is None:
            return
        head = self.keys.new_empty(1, 1, 1, self.keys.shape[3], dtype=self.dtype)
        # Where groups have slots, any other step asks the device which groups have none.
        dtypes = TRITON_DTYPES if isinstance(self.store, SlotStore) else AUTO_DTYPES
        if choose_backend(self.config.backend, head, dtypes) != "triton":
            return
        module = backend_module("triton", self.keys)
        self._step = module.decode_step
        if fetches:
            self._step = module.fetch_step
            self._refusal = module.fetch_step_unsupported_reason
        rotary = self.spec.rotary
        if rotary is None or not rotary.inv_freq.numel():
            return
        device = self.keys.device
        tables = module.rotation_tables(rotary, self.group_size, device)
        wanted = ((self.group_size, rotary.inv_freq.numel()), device)
        if self._tables is None or (self._tables[0].shape, self._tables[0].device) != wanted:
            self._tables = tables
        # Tables stay where they are, also with new numbers: a captured step reads them there.
        # mutant 4: a captured step goes on with the tables of old frequencies
        if self._tables is not tables:
            for table, fresh in zip(self._tables, tables):
                table.copy_(fresh)

    # Beginning, length and padding

    def _start(self, k: Tensor, length: int) -> None:
        """Fix the group size and allocate, for keys such as k [B, Hkv, n, D] and rows that will
        first have `length` tokens, padding included."""
        config = self.config
        group_size = self.group_size
        if config.num_groups is not None:
            if len(set(self.pads)) > 1:
                raise ValueError(
                    "num_groups must be used with rows of one length, got different padding. "
                    "Set group_size, or run the rows one by one."
                )
            sizes = (config.window_size, config.num_groups)
            group_size = group_size_for(length - self.pads[0], *sizes)
        self._set_sizes(group_size, k.dtype)
        self.ring_room = self.max_length or LEAST_RING
        shape = (*k.shape[:2], self.size(self.max_length or 0))
        like = self.encode(k[:, :, :1], k[:, :, :1])
        self.allocate_store(like, max(length, self._planned) - min(self.pads))
        if self.has_mass:
            mass = k[:, :, :1, :1].to(torch.promote_types(k.dtype, torch.float32))
            like = [*like, mass]
        self.allocate(shape, like)
        self._choose_step()
        self.is_empty = False

    def _take_padding(
        self, mask: Tensor | None, batch: int, start: int, end: int, device: torch.device
    ) -> list[int]:
        """Update the padding from the mask of an append, which has the places start .. end - 1 of
        each row; return the place behind each row's last token."""
        self._check_rows(batch)
        if self.is_empty:
            self.pads = [0] * batch
        if not self.is_empty and self.config.num_groups is not None and end - start > 1:
            raise ValueError(
                "num_groups must get the whole prompt in one call, got more tokens on a filled "
                "cache: g follows from the prompt's length. Set group_size instead."
            )
        before = self.pads
        stops = [end] * batch
        if mask is not None:
            if start and mask.shape[-1] == end - start:  # a mask of the new tokens only
                cached = torch.arange(start, device=mask.device) >= self.pad[:, None]
                mask = torch.cat((cached, mask.bool()), 1)
            pads = [end] * batch  # rows without a segment of tokens are padding so far
            for segment in find_segments(batch, end, mask):
                for row in range(segment.first_row, segment.end_row):
                    pads[row] = segment.start
                    stops[row] = segment.end
            for row, (cached_pad, pad) in enumerate(zip(before, pads)):
                # mutant 4: cached padding becomes tokens
                if min(cached_pad, start) != min(pad, start):
                    raise ValueError(
                        f"attention_mask must keep the padding of the cached tokens: row {row} has "
                        f"{cached_pad} padded tokens, got {pad}."
                    )
            self.pads = pads
            if min(stops) < end:
                self.close("a batch padded on the right")
        if self.is_empty or self.pads != before:
            self._store_pads(device)
        return stops

    # Changing window and rows

    @unchanged_by_errors
    def shrink_window(self, window_size: int) -> None:
        """Let all later queries see only the nearest `window_size` tokens uncompressed, and free
        the rest of the ring.

        Exact: a group is pooled as soon as it closes, so core tokens of all that leaves the window
        exist already. The buffers are replaced by smaller ones: capture captured steps again.

        Args:
            window_size: The new s, in tokens, at most the present one.

        Raises:
            ValueError: larger than now (the tokens are gone), or less than 1.
        """
        config = self.config.replace(window_size=window_size)
        if window_size > self.config.window_size:
            raise ValueError(
                f"window_size must be at most {self.config.window_size} once set, got "
                f"{window_size}. Start a new cache for a larger window."
            )
        self.catch_up()
        old_ring = self.ring_size
        self.config = config
        self.spec = self.spec.replace(window_size=window_size)
        if self.store is not None:
            self.store.shrink_window(self.spec)
        ring = self.ring_size
        if not self.buffers or ring == old_ring:
            return
        self._oldest_in_ring = max(self._oldest_in_ring, self.seq_len - ring)
        # mutant 4: a draft from before a shrink is undone in the smaller ring
        self._undo = None
        # Positions that stay; below 0 in short rows, whose entries no query sees.
        kept = (self.seen - self.pad)[:, None] + torch.arange(-ring, 0, device=self.pad.device)
        buffers = []
        for buffer in self.buffers:
            smaller = buffer[:, :, old_ring - ring :].clone()
            # mutant inference: a smaller ring filled by old slots
            write(smaller, kept % ring, read(buffer, kept % old_ring))
            buffers.append(smaller)
        self.buffers = buffers
        if self.max_length is not None:
            for buffer in buffers:
                torch._dynamo.mark_static_address(buffer)
