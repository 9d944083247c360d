"""Say for which lengths full attention takes less time than fetch by kernels."""

from __future__ import annotations

from corecontext.fetch_sizes import num_parts
from corecontext.ops.spec import Spec

# Index keys of a group, and the tokens up to which full attention (cuDNN's) takes less time, by
# whether queries share a choice and whether gradients follow. Measured on an H200 with 32 query and
# 8 KV heads of 128, g = 16, k = 64 (docs/fetch.md); more keys take longer than those in the table.
_LENGTHS = {
    (True, False): ((1, 12288), (8, 12288)),
    (True, True): ((1, 16384), (8, 16384)),
    (False, False): ((1, 40960), (8, 57344)),
    (False, True): ((1, 28672), (8, 36864)),
}


def is_full_faster(spec: Spec, length: int, has_gradients: bool) -> bool:
    """Return whether full attention takes less time than fetch on a sequence from position 0 on."""
    sizes = spec.group_size if isinstance(spec.group_size, tuple) else (spec.group_size,)
    keys = max(num_parts(spec.fetch_index, size) for size in sizes)
    table = _LENGTHS[spec.fetch_share > 1, has_gradients]
    longest = next((tokens for most, tokens in table if keys <= most), table[-1][1])
    return length <= longest
