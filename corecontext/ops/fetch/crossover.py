"""Say for which lengths full attention takes less time than fetch by kernels, in calls without a
cache; for prompts and steps of a cache prompt_rule.py does."""

from corecontext.ops.fetch.index import Index, index_of
from corecontext.ops.spec import Spec

# By whether queries share a choice, and whether a backward follows: pairs of the most index keys
# for each 16 tokens, and the longest sequence, in tokens, on which full attention (cuDNN's) takes
# less time; the last pair holds for more keys, too. The lengths are between those measured on an
# H200 with 32 query and 8 KV heads of 128, g = 16, k = 64, by earlier kernels. By today's, the
# forward of each query's choice takes less time at 131,072 tokens (docs/fetch-results.md).
_LENGTHS = {
    (True, False): ((1, 12288), (8, 12288)),
    (True, True): ((1, 12288), (8, 12288)),
    (False, False): ((8, 57344),),
    (False, True): ((1, 32768), (8, 45056)),
}
_TOKENS = 1024
"""Raw tokens that a query fetched in these measurements: k g."""


def is_full_faster(spec: Spec, length: int, has_gradients: bool) -> bool:
    """Return whether full attention takes less time than fetch on a sequence from position 0 on."""
    sizes = spec.group_size if isinstance(spec.group_size, tuple) else (spec.group_size,)
    keys = max(16 * _num_keys(spec.fetch_index, size) / size for size in sizes)
    table = _LENGTHS[spec.fetch_share > 1, has_gradients]
    longest = next((tokens for most_keys, tokens in table if keys <= most_keys), table[-1][1])
    # Raw tokens take time in proportion to their number.
    return length <= longest * max(1.0, spec.fetch_groups * max(sizes) / _TOKENS)


def _num_keys(index: str | Index, group_size: int) -> int:
    return index_of(index).num_keys(group_size)


# Constant for torch.compile, as in ops/capability.py: it cannot trace the import of an index.
_num_keys._dynamo_marked_constant = True
