"""How long does one decoding step of a layer take, from the compact cache and from a full one?

A step stores the new token and attends from it to everything before. It is bound by reading the
cache, so the steps go round over the caches of as many layers as it takes for none to be left in
the last-level cache when its turn comes. On a GPU a round is captured in a CUDA graph, as serving
does; on a CPU it runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from benchmarks.methods import KERNELS, attend_cca, make_inputs, rotary_for
from corecontext import cost
from corecontext.cache import CompactLayer
from corecontext.config import CCAConfig
from corecontext.measure import capture, sample_in_turns

ROTATE_BYTES = {"cpu": 2**28, "cuda": 2**29}  # several times what a last-level cache holds
MAX_LAYERS = 64
MAX_ROUNDS = 16  # one group of 16; a cache is filled to this many tokens below the length
FREE_SHARE = 0.9  # of the free memory that caches may take


def decode_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """Those that can decode."""
    return tuple(method for method in methods if method in ("full", *KERNELS, "cca"))


def layers_for(
    length: int, method: str, sizes: dict[str, Any], group_size: int, window_size: int
) -> tuple[int, int]:
    """How many layers' caches to go round, and the bytes that one step of one layer reads."""
    g, s = (group_size, window_size) if method == "cca" else (1, 1)
    itemsize = getattr(torch, sizes["dtype"]).itemsize
    num_bytes = cost.decode_bytes(
        length - 1,
        sizes["kv_heads"],
        sizes["head_dim"],
        itemsize,
        group_size=g,
        window_size=s,
        batch=sizes["batch"],
    )
    rotate = ROTATE_BYTES[torch.device(sizes["device"]).type]
    return max(1, min(MAX_LAYERS, -(-rotate // num_bytes))), num_bytes


def decode_seconds(
    length: int,
    methods: Sequence[str],
    sizes: dict[str, Any],
    group_size: int,
    window_size: int,
    *,
    repeats: int,
    budget_s: float,
    on_skip: Callable[[str, str], None],
) -> dict[str, list[float]]:
    """Seconds of one step of one layer at this context length by method, taking turns.

    Args:
        sizes: query_heads, kv_heads, head_dim, batch, dtype and device.
        on_skip: Told a method and why it is left out: no memory, or the kernel refuses.
    """
    device, rounds = sizes["device"], min(MAX_ROUNDS, max(1, length - 1))
    cuda = torch.device(device).type == "cuda"
    calls: dict[str, Callable[[], Any]] = {}
    layers = {}
    for method in methods:
        layers[method], num_bytes = layers_for(length, method, sizes, group_size, window_size)
        if cuda and layers[method] * num_bytes > FREE_SHARE * torch.cuda.mem_get_info(device)[0]:
            on_skip(method, f"its cache takes {layers[method] * num_bytes / 2**30:.0f} GiB")
            continue
        try:
            calls[method] = _rounds(
                length, method, sizes, group_size, window_size, layers[method], rounds, cuda
            )
        except (RuntimeError, NotImplementedError) as error:
            on_skip(method, str(error).strip().split("\n")[0][:100] or type(error).__name__)
    found = sample_in_turns(calls, repeats=repeats, device=device, budget_s=budget_s)
    return {
        method: [x / rounds / layers[method] for x in seconds] for method, seconds in found.items()
    }


def _rounds(
    length: int,
    method: str,
    sizes: dict[str, Any],
    group_size: int,
    window_size: int,
    layers: int,
    rounds: int,
    cuda: bool,
) -> Callable[[], None]:
    """A call of so many decoding rounds over the layers, the last at the context length; then all
    is set back."""
    q, k, v = make_inputs(
        1,
        sizes["query_heads"],
        sizes["kv_heads"],
        sizes["head_dim"],
        sizes["batch"],
        sizes["dtype"],
        sizes["device"],
    )
    start = length - rounds
    if method == "cca":
        caches = [filled_layer(k, start, length, group_size, window_size) for _ in range(layers)]

        def one_round() -> None:
            for cache in caches:
                cache.attend(q, k, v)

        def set_back() -> None:
            for cache in caches:
                assert isinstance(cache.seen, Tensor)
                cache.seen.fill_(start)
    else:
        full = [FullCache(k, length, method) for _ in range(layers)]
        position = torch.zeros(1, dtype=torch.long, device=k.device)  # of all layers, as in a model

        def one_round() -> None:
            for cache in full:
                cache.attend(q, k, v, position)
            position.add_(1)

        def set_back() -> None:
            position.fill_(start)

    def run(first: Callable[[], object], then: Callable[[], object]) -> None:
        with torch.no_grad():
            first()
            for _ in range(rounds):
                then()

    with torch.no_grad():
        set_back()
        steps = (capture(set_back), capture(one_round)) if cuda else (set_back, one_round)
    return lambda: run(*steps)


def filled_layer(
    like: Tensor, seen: int, max_length: int, group_size: int, window_size: int
) -> CompactLayer:
    """A compact cache of fixed size that holds `seen` random tokens, without the prefill that would
    make them.

    Args:
        like: Keys of one step, [B, Hkv, 1, D].
    """
    layer = CompactLayer(
        CCAConfig(group_size, window_size), rotary_for(like), max_length=max_length
    )
    batch, heads, _, dim = like.shape
    entries = (
        cost.cache_entries(seen, group_size, window_size)
        if group_size > 1
        else layer.ring_size + seen
    )
    keys, values = (
        torch.randn(batch, heads, entries, dim, dtype=like.dtype, device=like.device)
        for _ in range(2)
    )
    layer.load_state_dict(
        {
            "config": layer.config.to_dict(),
            "rollback": 0,
            "group_size": group_size,
            "core_width": 1,
            "seen": seen,
            "intact_from": seen,
            "ended": None,
            "keys": keys,
            "values": values,
            "pad": torch.zeros(batch, dtype=torch.long, device=like.device),
        }
    )
    return layer


class FullCache:
    """The baseline: every key and value in a static buffer, of which a step sees all."""

    def __init__(self, like: Tensor, length: int, method: str) -> None:
        batch, heads, _, dim = like.shape
        self.keys, self.values = (
            torch.randn(batch, heads, length, dim, dtype=like.dtype, device=like.device)
            for _ in range(2)
        )
        self._kernel = KERNELS.get(method)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        """Store one token at a position [1], attend to the whole buffer."""
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        grouped = q.shape[1] != k.shape[1]
        if self._kernel is None:
            return F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=grouped)
        with sdpa_kernel(self._kernel):
            return F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=grouped)


@torch.no_grad()
def check_decode(sizes: dict[str, Any], group_size: int, window_size: int) -> None:
    """Raise unless a step of the compact cache, captured or not, is what the whole sequence gives
    in float64."""
    length = window_size + 4 * group_size + 3
    q, k, v = make_inputs(length, **{**sizes, "batch": 1})
    layer = CompactLayer(CCAConfig(group_size, window_size), rotary_for(q), max_length=length)
    layer.attend(*(x[:, :, :-1] for x in (q, k, v)))
    out = layer.attend(*(x[:, :, -1:] for x in (q, k, v)))[:, :, 0].double()
    truth = attend_cca(
        q.double(), k.double(), v.double(), group_size, window_size, backend="reference"
    )[:, :, -1]
    error, bound = (out - truth).abs().amax(-1), 8 * torch.finfo(q.dtype).eps * truth.abs().amax(-1)
    if not bool((error <= bound).all()):
        raise AssertionError(
            f"decoding is wrong on this machine, nothing was timed: it is off by "
            f"{float(error.max()):.2e}, allowed is {float(bound.min()):.2e}"
        )
