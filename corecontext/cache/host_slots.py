"""Assign slots: places on the device for recently fetched groups, whose raw tokens are in host
memory.

For each row and KV head the device holds slots of one group each, and a table that tells the slot
of each group. A step reads the groups that it has chosen from their slots. Before, those without a
slot are loaded: they replace the groups that were not read for longest.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from corecontext.cache.host_store import HostStore
from corecontext.cache.raw_store import Format, num_bytes
from corecontext.cache.unchanged import unchanged_by_errors, write_last
from corecontext.ops.spec import FetchSlots, RawSlots, Spec

FREE = -1
"""In place of a number: the group of an empty slot, and the slot of a group that has none."""


class SlotStore(HostStore):
    """A store in host memory with slots of groups on the device.

    Args:
        num_slots: Most slots of a row and KV head, at least `spec.fetch_groups`.
        spec, like, format, length: Settings, stored key and value, their form, tokens of room.
    """

    _BY_ROW = (*HostStore._BY_ROW, "slots", "owner", "last_used", "table", "counts")

    def __init__(
        self, spec: Spec, like: list[Tensor], format: Format, length: int, num_slots: int
    ) -> None:
        super().__init__(spec, like, format, length)
        self.num_slots = num_slots
        shape = self.raw[0].shape[:2]
        self.counts = torch.zeros(*shape, 3, dtype=torch.long, device=like[0].device)
        """Steps, groups found in a slot and groups read so far, [B, Hkv, 3]."""
        self._make_slots()

    def _make_slots(self) -> None:
        """Make empty slots for as many groups as there is room for, at most `num_slots`."""
        groups = self.num_groups(self.length)
        count = min(self.num_slots, groups)
        shape = self.raw[0].shape[:2]
        size = self.spec.group_size
        self.slots = [x.new_zeros(*shape, count, size, x.shape[3]) for x in self.raw]
        """Keys and values of groups, [B, Hkv, slots, g, D]; in 8 bits scales of both follow."""
        options = {"device": self.raw[0].device}
        # The last column takes what is written for no group.
        self.table = torch.full((*shape, groups + 1), FREE, dtype=torch.int32, **options)
        """The slot of each group, [B, Hkv, M + 1]."""
        self.owner = torch.full((*shape, count), FREE, dtype=torch.int32, **options)
        """The group of each slot, [B, Hkv, slots]."""
        self.last_used = torch.zeros((*shape, count), dtype=torch.long, **options)
        """The step that last read each slot, [B, Hkv, slots]."""

    def as_slots(self) -> RawSlots | None:
        """Return the buffers as a step in Triton takes them; None where there is no such step."""
        raw = super().as_slots()
        if raw is None:
            return None
        tensors = (*self.slots, self.table, self.owner, self.last_used, self.counts)
        return raw._replace(slots=FetchSlots(*tensors))

    # Sizes

    def device_bytes(self, length: int) -> int:
        """Bytes in use on the device, by rows of `length` tokens: of the index, and of slots and
        table for their groups."""
        groups = self.num_groups(length)
        each = (*self.slots, self.owner, self.last_used)
        slots = [x[:, :, : min(groups, self.num_slots)] for x in each]
        return num_bytes([*self._used_index(length), *slots, self.table[:, :, : groups + 1]])

    @property
    def _slot_tensors(self) -> list[Tensor]:
        return [*self.slots, self.owner, self.last_used, self.table, self.counts]

    @property
    def hits(self) -> Tensor:
        """Groups that steps found in a slot, summed over rows and KV heads."""
        return self.counts[..., 1].sum()

    @property
    def lookups(self) -> Tensor:
        """Groups that steps read, summed over rows and KV heads."""
        return self.counts[..., 2].sum()

    @property
    def extras(self) -> list[Tensor]:
        """The tensors beside the raw tokens, which are always on the device."""
        return [*super().extras, *self._slot_tensors]

    # Rows and length

    @unchanged_by_errors
    def reserve(self, length: int) -> None:
        """Make room for `length` tokens; a store that grows empties its slots."""
        before = self.length
        super().reserve(length)
        if self.length > before:
            self._make_slots()

    @unchanged_by_errors
    def select(self, rows: Tensor) -> None:
        """Keep the given rows, [new B], in the given order."""
        # mutant fetch: rows are reordered without their table
        self.table = self.table.index_select(0, rows)
        self.owner = self.owner.index_select(0, rows)
        self.last_used = self.last_used.index_select(0, rows)
        self.slots = [x.index_select(0, rows) for x in self.slots]
        self.counts = self.counts.index_select(0, rows)
        super().select(rows)  # last: host memory is changed in place

    def forget(self, lengths: Tensor) -> None:
        """Empty the slots of groups that rows of `lengths` [B] tokens have no more."""
        counts = ((lengths - self.spec.sinks) // self.spec.group_size).clamp(min=0)
        groups = torch.arange(self.table.shape[2], device=self.table.device)
        is_cropped = (groups >= counts[:, None])[:, None]
        is_gone = self.owner >= counts[:, None, None]
        # mutant fetch: a group cropped away keeps its slot
        write_last(functools.partial(self.table.masked_fill_, is_cropped, FREE))
        write_last(functools.partial(self.owner.masked_fill_, is_gone, FREE))
        write_last(functools.partial(self.last_used.masked_fill_, is_gone, 0))

    def clear(self) -> None:
        """Forget all tokens, in place."""
        super().clear()
        self._empty_slots()

    def _write_state(self, state: Sequence[Tensor], centre: Tensor | None) -> None:
        super()._write_state(state, centre)
        self._empty_slots()

    def _empty_slots(self) -> None:
        for tensor in (*self.slots, self.last_used):
            tensor.zero_()
        self.table.fill_(FREE)
        self.owner.fill_(FREE)

    def move_row(self, target: int, source: int, length: int) -> None:
        """Copy a row of `length` tokens to another row, with its slots."""
        super().move_row(target, source, length)
        for x in self._slot_tensors:
            # mutant fetch: a row moves without its slots
            x[target] = x[source]

    # Reading

    @torch.compiler.disable
    def groups(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [N, k g, D] of groups [N, k], any tokens for -1.

        Asks the device which groups have no slot, so that it cannot be captured; the step in Triton
        does not ask.
        """
        try:
            slot = self._load_missing(numbers)
        except BaseException:
            self._empty_slots()  # a slot may have a group's number without its tokens
            raise
        sequence = torch.arange(len(slot), device=slot.device)[:, None]  # [N, 1]
        stored = [x.flatten(0, 1)[sequence, slot].flatten(1, 2) for x in self.slots]
        keys, values = self._decoded(stored)
        return keys, values

    def _load_missing(self, numbers: Tensor) -> Tensor:
        """Load the groups [N, k] that have no slot; return the slots of all, [N, k]."""
        slot, is_missing = self._find_slots(numbers.long())
        sequence, place = is_missing.nonzero(as_tuple=True)
        size = self.spec.group_size
        first = self.spec.sinks + numbers[sequence, place].long() * size
        positions = first[:, None] + torch.arange(size, device=numbers.device)
        for buffer, x in zip(self.slots, self.raw):
            missing = x.flatten(0, 1)[sequence[:, None], positions]  # [misses, g, D]
            buffer.flatten(0, 1)[sequence, slot[sequence, place]] = missing
        return slot

    def _find_slots(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """Give each of the groups [N, k] a slot; return the slots [N, k], any for group -1, and
        True for groups that are still to be loaded into theirs, [N, k]."""
        tensors = (self.table, self.owner, self.last_used, self.counts)
        table, owner, last_used, counts = (x.flatten(0, 1) for x in tensors)
        scratch = table.shape[1] - 1  # the column of no group
        is_group = group >= 0
        slot = table.gather(1, torch.where(is_group, group, scratch)).long()
        is_hit = slot >= 0
        is_missing = is_group & ~is_hit
        counts[:, 0] += 1
        counts[:, 1] += is_hit.sum(1)
        counts[:, 2] += is_group.sum(1)

        # Missing groups get the slots that were not read for longest, empty ones first; those that
        # this step reads sort last. There are at least k slots, so the others are enough.
        num_slots = owner.shape[1]
        is_read = owner.new_zeros(len(owner), num_slots + 1, dtype=torch.bool)
        is_read.scatter_(1, torch.where(is_hit, slot, num_slots), True)
        never = torch.iinfo(torch.long).max
        age = last_used.masked_fill(is_read[:, :num_slots], never)
        order = age.argsort(dim=1, stable=True)
        rank = is_missing.cumsum(1) - 1
        slot = torch.where(is_hit, slot, order.gather(1, rank.clamp(min=0)))

        sequence, place = is_group.nonzero(as_tuple=True)
        group = group[sequence, place]
        own = slot[sequence, place]
        evicted = owner[sequence, own].long()  # the group itself where it had the slot
        # mutant fetch: an evicted group keeps its slot
        table[sequence, torch.where(evicted >= 0, evicted, scratch)] = FREE
        table[sequence, group] = own.int()
        owner[sequence, own] = group.int()
        last_used[sequence, own] = counts[sequence, 0]
        return slot, is_missing
