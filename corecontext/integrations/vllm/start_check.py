"""Check when vLLM starts that it keeps pages as planned: in a release that does not, they would
hold other tokens, and no error would tell. Needs vLLM."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import vllm
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from corecontext.integrations.vllm.cache_specs import WindowSpec
from corecontext.integrations.vllm.page_layout import PageLayout
from corecontext.integrations.vllm.plugin import RELEASES, is_tested
from corecontext.ops.capability import is_captured

CHANGED = (ImportError, AttributeError, TypeError, AssertionError, LookupError)
"""Errors of a release with other interfaces."""


def check_start(specs: Sequence[AttentionSpec]) -> None:
    """Check the kinds of caches of a model, that of windows first if there is one, before vLLM asks
    for them.

    Raises:
        ValueError: this release keeps other pages than planned.
    """
    check_page_bytes(specs)
    try:
        if isinstance(specs[0], WindowSpec):
            check_kept_pages(specs)
    except CHANGED as error:
        raise refusal("interfaces of pages", "be those of a tested release", error) from error
    if not is_tested(vllm.__version__):
        warnings.warn(
            f"vLLM {vllm.__version__} is untested with core context, which has run with "
            f"{RELEASES}; the check at the start passed.",
            stacklevel=2,
        )


def check_page_bytes(specs: Sequence[AttentionSpec]) -> None:
    """Raise ValueError where the kinds of pages have different bytes: vLLM would give a page more
    tokens than planned."""
    sizes = [spec.page_size_bytes for spec in specs]
    if len(set(sizes)) > 1:
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise refusal(f"page bytes of {kinds}", "be equal", sizes)


def check_kept_pages(specs: Sequence[AttentionSpec]) -> None:
    """Raise ValueError where vLLM's manager of pages drops one that a step reads. It is tried with
    a request that outgrows its window, then with one that begins alike and shares its pages."""
    layout = specs[0].layout
    tokens = layout.sink_pages * layout.page_size + layout.window_tokens + 2 * layout.page_size
    sizes = [spec.block_size for spec in specs]
    tokens += 2 * math.lcm(*sizes)
    hash_size = math.gcd(*sizes)
    groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
    pages = 2 + sum(-(-tokens // size) for size in sizes)
    manager = KVCacheManager(KVCacheConfig(pages, [], groups), tokens, math.lcm(*sizes), hash_size)

    def hashes(request: Request) -> list[bytes]:
        first = len(request.block_hashes)
        return [i.to_bytes(32, "big") for i in range(first, request.num_tokens // hash_size)]

    for name in ("alone", "alike"):
        params = SamplingParams(max_tokens=1)
        request = Request(name, [0] * tokens, params, None, block_hasher=hashes)
        shared, computed = manager.get_computed_blocks(request)[:2]
        given = {"num_new_computed_tokens": computed, "new_computed_blocks": shared}
        while computed < tokens:
            count = min(layout.page_size, tokens - computed)
            manager.new_step_starts()
            manager.allocate_slots(request, count, **given)
            given = {}
            table = manager.get_block_ids(name)[0]
            kept = layout.window_pages(computed, computed + count)
            lost = [page for page in kept if not table[page]]
            if lost:
                raise refusal(f"pages of a request {name}", "be kept by vLLM", f"{lost} dropped")
            computed += count
            request.num_computed_tokens = computed
        manager.free(request)


def check_group(spec: AttentionSpec, planned: AttentionSpec) -> None:
    """Raise ValueError where a group of layers has other pages than planned."""
    sizes = [(each.block_size, each.page_size_bytes) for each in (planned, spec)]
    if sizes[0] != sizes[1]:
        kind = type(planned).__name__
        raise refusal(f"tokens and bytes of a page of {kind}", f"be {sizes[0]}", sizes[1])


def check_layout(cache: Tensor, spec: AttentionSpec) -> None:
    """Raise ValueError where a cache is not [P, Hkv, E, 2 D], each page in one piece, with room for
    the masses behind it."""
    shape = (spec.num_kv_heads, spec.num_states, 2 * spec.head_size)
    if tuple(cache.shape[1:]) != shape:
        raise refusal("shape of a page", f"be {shape}", tuple(cache.shape[1:]))
    last = sum((size - 1) * stride for size, stride in zip(shape, cache.stride()[1:]))
    sizes = (last + 1, cache.stride(0))
    planned = (math.prod(shape), spec.page_size_bytes // cache.element_size())
    if cache.stride(-1) != 1 or sizes[0] != planned[0] or sizes[1] < planned[1]:
        rule = f"be {planned[0]} in one piece and pages at least {planned[1]} apart"
        raise refusal("numbers of a page", rule, f"{sizes[0]} and {sizes[1]}")


def check_table(table: Tensor, starts: Tensor, lengths: Tensor, layout: PageLayout) -> bool:
    """Check that vLLM's runner passes on the pages of first tokens. Return whether this step could
    tell: it needs a request that has outgrown its window. Then this asks the device.

    Args:
        table: Window pages of the requests of a step, [B, most pages].
        starts: Where their new tokens begin, on the CPU, [B + 1].
        lengths: Their tokens on the CPU, [B], the new ones included.
        layout: Pages as planned.

    Raises:
        ValueError: vLLM's runner does not pass the first pages on.
    """
    if is_captured(table.device):
        return False
    computed = lengths - starts.diff()
    row = int(computed.argmax())
    if layout.first_kept(int(computed[row])) < (layout.sink_pages + 1) * layout.page_size:
        return False
    pages = table[row].tolist()
    if not pages[(int(lengths[row]) - 1) // layout.page_size]:
        return False  # a step that only warms up, whose pages are all the empty one
    first = pages[: layout.sink_pages]
    if not all(first):
        raise refusal("first pages of a request", "be passed on by vLLM's runner", first)
    return True


def refusal(name: str, rule: str, given: object) -> ValueError:
    """Make the error of a release that keeps other pages than planned."""
    return ValueError(
        f"{name} must {rule} for core context, got {given} in vLLM {vllm.__version__}. Install "
        f"{RELEASES}."
    )
