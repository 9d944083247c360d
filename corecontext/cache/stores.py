"""Make the store of raw tokens that a layer's settings ask for."""

import torch
from torch import Tensor

from corecontext.cache.host_slots import SlotStore
from corecontext.cache.host_store import HostStore
from corecontext.cache.raw_store import Format, RawStore
from corecontext.config import CCAConfig
from corecontext.ops.spec import Spec


def new_store(
    config: CCAConfig,
    spec: Spec,
    like: list[Tensor],
    dtype: torch.dtype,
    length: int,
    *,
    on_device: bool = False,
) -> RawStore:
    """Make the empty store of a layer with fetch, on the device or where its settings say.

    Args:
        spec: The layer's settings, its group size fixed.
        like: A key and a value as the cache stores them, [B, Hkv, 1, D]; in 8 bits their scales
            [B, Hkv, 1, 1] follow.
        dtype: Of keys and values before they are rounded.
        length: Tokens to make room for.
    """
    format = Format(config.cache_dtype, dtype)
    if on_device or config.store == "device":
        store = RawStore(spec, like, format, length)
    else:
        store = _host_store(config, spec, like, format, length)
    store.backend = config.backend
    return store


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory of its own beside the host's."""
    return device.type != "cpu"


def _host_store(
    config: CCAConfig, spec: Spec, like: list[Tensor], format: Format, length: int
) -> RawStore:
    """Make a store in host memory, with slots where they help; arguments as of `new_store`."""
    # Where device and host have one memory, slots would be copies that save nothing.
    needs_slots = config.fetch_slots is not None or has_own_memory(like[0].device)
    num_slots = config.slots_for(length)
    if not num_slots or not needs_slots:
        return HostStore(spec, like, format, length)
    return SlotStore(spec, like, format, length, num_slots)
