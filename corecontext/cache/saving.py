"""Save the state of one layer's compact cache, load it, and share it between caches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from corecontext.cache.cropping import CroppedState
from corecontext.cache.unchanged import unchanged_by_errors, write_last
from corecontext.config import CCAConfig


class SavedState(CroppedState):
    """The state of one layer's cache, which can be saved, and copied into another cache."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that another cache needs to continue; tensors are views of those in use, not
        copies."""
        keys = values = None
        scales: list[Tensor] = []
        if self.buffers:
            keys, values, *scales = [x[:, :, : self.used] for x in self.buffers]
        return {
            "config": self.config.to_dict(),
            "rollback": self.rollback,
            "group_size": self.group_size,
            "ring": self.ring_size,
            "seen": self.seq_len,
            "intact_from": self._oldest_in_ring,
            "ended": self._closed,
            "pad": self.pad,
            "keys": keys,
            "values": values,
            "scales": scales,
            "dtype": self.dtype,
            "store": self.store.used(self._longest) if self.store else [],
        }

    @unchanged_by_errors
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state made under the same configuration and rollback.

        Raises:
            ValueError: its configuration or rollback differs.
        """
        same_config = CCAConfig.from_dict(state["config"]) == self.config
        if not same_config or state["rollback"] != self.rollback:
            raise ValueError(
                f"the state must come from a cache with config {self.config.to_dict()} and "
                f"rollback {self.rollback}, got {state['config']} and {state['rollback']}."
            )
        if state["keys"] is None:
            write_last(self.reset)
            return
        self.fill(
            [state["keys"], state["values"], *state.get("scales", ())],
            state["seen"],
            group_size=state["group_size"],
            dtype=state.get("dtype"),
            pad=state["pad"],
            store=state.get("store", []),
            ring=state.get("ring"),
        )
        # mutant 4: a loaded ring passes for whole
        self._oldest_in_ring = state["intact_from"]
        # mutant 4: a loaded cache forgets that it is closed
        self._closed = state["ended"]

    def adopt(self, buffers: list[Tensor], like: SavedState) -> None:
        """Take these buffers, which a server fills, and let steps append to them: they are laid out
        as those of `like`, a filled cache of the same settings."""
        self.buffers = buffers
        self._set_sizes(like.group_size, like.dtype)
        self._counted = None
        self.is_empty = False
        self._choose_step()

    def copy_since(self, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Copy ring and sinks, and the core tokens that came after the first `length` tokens, of
        one row without padding: a tensor of each buffer. `fill` takes ring and sinks of the last
        copy, followed by the core tokens of all copies."""
        # mutant sinks: a shared beginning without them
        raw = [x[:, :, : self.raw_size].clone() for x in self.buffers]
        before = self.raw_size + self.num_cores(length)
        return raw, [x[:, :, before : self.used].clone() for x in self.buffers]

    @unchanged_by_errors
    def fill(
        self,
        buffers: list[Tensor],
        length: int,
        *,
        group_size: int,
        dtype: torch.dtype | None = None,
        pad: Tensor | None = None,
        store: Sequence[Tensor] = (),
        ring: int | None = None,
    ) -> None:
        """Copy `length` tokens a row, padding included, from buffers laid out as this layer's.

        Args:
            buffers: As `Entries.buffers`, up to the last core token; group_size is their g.
            dtype: Of keys and values before they were rounded; None is that of the buffers.
            pad: [B], left padding; None is one row without.
            store: Raw tokens and index, as `RawStore.used` returns them.
            ring: Slots of the ring in `buffers`; None is `whole_ring`.

        Raises:
            NotImplementedError: the layer fetches, and `store` is empty.
        """
        if self.config.fetch_groups and not store:
            raise NotImplementedError(
                f"fetch_groups must be 0 where prompts are shared, got {self.config.fetch_groups}."
            )
        if self.max_length is not None:
            self._make_room(length)
        self._set_sizes(group_size, dtype or buffers[0].dtype)
        self.ring_room = ring if self.max_length is None else self.max_length
        used = buffers[0].shape[2]
        slots = used if self.max_length is None else self.size(self.max_length)
        if pad is None:
            pad = torch.zeros(1, dtype=torch.long, device=buffers[0].device)
        # mutant 4: a cache loses its own state when it loads it
        self.pads = pad.tolist()
        self._store_pads(pad.device)
        self.is_late = False
        if self.max_length is None:
            self.buffers = []
            self.store = None
        self.allocate((*buffers[0].shape[:2], slots), buffers)
        if store:
            num_raw = 2 if self.config.cache_dtype == "auto" else 4
            # Zeros, as a saved cache may have no token left.
            like = [x.new_zeros((*x.shape[:2], 1, x.shape[3])) for x in store[:num_raw]]
            self.begin_prompt(like[0])
            self.allocate_store(like, length - min(self.pads))
            self.store.load(store)
        rings = (self.ring_size, ring or self.whole_ring)
        write_last(functools.partial(_fill_buffers, self.buffers, buffers, rings))
        self._clear()
        self.set_length(length)
        self._oldest_in_ring = max(0, length - self.ring_size)
        self.is_empty = False
        self._choose_step()


def _fill_buffers(buffers: list[Tensor], state: list[Tensor], rings: tuple[int, int]) -> None:
    """Copy a state into buffers, which it may be itself. `rings` are the slots of the ring in
    buffers and state; where they differ, its tokens are in the first ones of both."""
    ring, state_ring = rings
    common = min(rings)
    for buffer, x in zip(buffers, state):
        end = ring + x.shape[2] - state_ring
        buffer[:, :, ring:end] = x[:, :, state_ring:]
        buffer[:, :, :common] = x[:, :, :common]
        buffer[:, :, common:ring] = 0
        buffer[:, :, end:] = 0
