"""Place the index of fetch in vLLM's pages.

With fetch a layer has pages of raw tokens, as full attention has, and pages of core tokens with the
same bytes. Behind the keys and values of its core tokens such a page holds the scales and the codes
of their groups' index, and at its end the masses. The centre of the index is in the first entry of
the first page, whose group stays raw. So it has fewer entries than a page of raw tokens
has tokens (`page_layout.core_entries`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from corecontext.ops.spec import Spec
from corecontext.ops.triton.paged.attend_rows import rotations_of
from corecontext.ops.triton.paged.pages import IndexPages


def index_pages_of(cache: Tensor, dtype: torch.dtype, spec: Spec) -> IndexPages:
    """Return the index in a cache of core tokens [P, Hkv, E, 2 D], for queries of this dtype."""
    pages, heads, entries, width = cache.shape
    itemsize = cache.element_size()
    keys = spec.index.num_keys(spec.group_size)
    num_scales = 1 if spec.index.shares_scale else keys
    num_bytes = keys * -(-width // 2 * spec.index.bits // 8)

    def view(kind: torch.dtype, numbers: int, first: int) -> Tensor:
        """Return numbers of each entry, from a byte of each page on."""
        flat = torch.empty(0, dtype=kind, device=cache.device)
        flat.set_(cache.untyped_storage())
        size = flat.element_size()
        strides = (cache.stride(0) * itemsize // size, numbers, entries * numbers, 1)
        return flat.as_strided((pages, entries, heads, numbers), strides, first // size)

    first = (cache.storage_offset() + heads * entries * width) * itemsize
    scales = view(torch.float16, num_scales, first)
    codes = view(torch.uint8, num_bytes, first + 2 * heads * entries * num_scales)
    # The first entry is that of first tokens, which have no core token.
    strides = (cache.stride(0) * itemsize // 4, cache.stride(1) * itemsize // 4, 1)
    numbers = torch.empty(0, dtype=torch.float32, device=cache.device)
    numbers.set_(cache.untyped_storage())
    first = cache.storage_offset() * itemsize // 4
    centres = numbers.as_strided((pages, heads, width // 2), strides, first)
    return IndexPages(
        codes, scales, centres, rotations_of(spec.index.bits, width // 2, dtype, cache.device)
    )
