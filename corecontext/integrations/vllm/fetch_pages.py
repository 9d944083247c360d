"""Place the index of fetch in vLLM's pages.

A page of core tokens has the bytes of a page of raw tokens. It holds, one after the other: keys and
values of its core tokens, scales and codes of their groups' index, and at its end the masses. So it
has fewer entries than a page of raw tokens (`page_layout.core_entries`). The centre of the index is
in the first entry of a sequence's first page: the group of this entry stays raw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged.attend_rows import rotations_of
from corecontext.ops.triton.paged.pages import IndexPages


def index_pages_of(cache: Tensor, dtype: torch.dtype, spec: Spec) -> IndexPages:
    """Return the index, as views of a cache of core tokens: [P, Hkv, E, 2 D], P pages of E core
    tokens.

    Args:
        dtype: That of the queries.
    """
    pages, heads, entries, width = cache.shape
    itemsize = cache.element_size()
    keys = spec.index.num_keys(spec.group_size)
    num_scales = 1 if spec.index.shares_scale else keys
    num_bytes = keys * -(-width // 2 * spec.index.bits // 8)

    def view(kind: torch.dtype, numbers: int, first: int) -> Tensor:
        """Return [P, E, Hkv, numbers] of a dtype; `first` is their first byte in page 0."""
        flat = torch.empty(0, dtype=kind, device=cache.device)
        flat.set_(cache.untyped_storage())
        size = flat.element_size()
        strides = (cache.stride(0) * itemsize // size, numbers, entries * numbers, 1)
        return flat.as_strided((pages, entries, heads, numbers), strides, first // size)

    first = (cache.storage_offset() + heads * entries * width) * itemsize
    scales = view(torch.float16, num_scales, first)
    codes = view(torch.uint8, num_bytes, first + 2 * heads * entries * num_scales)
    # The centre has the first entry's bytes: first tokens have no core token.
    strides = (cache.stride(0) * itemsize // 4, cache.stride(1) * itemsize // 4, 1)
    numbers = torch.empty(0, dtype=torch.float32, device=cache.device)
    numbers.set_(cache.untyped_storage())
    first = cache.storage_offset() * itemsize // 4
    centres = numbers.as_strided((pages, heads, width // 2), strides, first)
    return IndexPages(
        codes, scales, centres, rotations_of(spec.index.bits, width // 2, dtype, cache.device)
    )
