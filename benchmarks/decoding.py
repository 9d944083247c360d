"""Time one decoding step of a layer, from the compact cache and from a full one.

A step stores the new token and attends from it to all before. It is bound by reading the cache, so
the steps rotate over the caches of as many layers as it takes for the last-level cache to hold none
when its turn comes. On a GPU a round is captured in a CUDA graph, as in serving.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from benchmarks.floor import decode_bytes
from benchmarks.methods import DECODING, KERNELS, Sizes, attend_cca, make_inputs, rotary_for
from benchmarks.timing import capture, sample_in_turns
from corecontext import cost
from corecontext.cache import CompactLayer
from corecontext.config import CCAConfig
from corecontext.ops.fetch.index import index_of
from corecontext.visibility import num_visible_cores

ROTATE_BYTES = {"cpu": 2**28, "cuda": 2**29}  # several times the size of a last-level cache
MAX_LAYERS = 64
MAX_ROUNDS = 16  # one group of 16; a cache is filled to this many tokens below the length
FREE_SHARE = 0.9  # of the free memory that caches may take


class DecodeTask(NamedTuple):
    """A decoding step to time."""

    length: int
    """Context length."""
    sizes: Sizes
    group_size: int
    window_size: int

    @property
    def rounds(self) -> int:
        """Steps of each layer in a timed call; the last one is at the context length."""
        return min(MAX_ROUNDS, max(1, self.length - 1))

    def step_bytes(self, method: str) -> int:
        """Return the bytes that one step of one layer reads."""
        sizes = self.sizes
        group_size, window_size = (1, 1)
        more = 0
        if method in DECODING:
            group_size, window_size = self.group_size, self.window_size
        if method == "fetch":
            more = self._fetched_bytes(**DECODING[method])
        return more + decode_bytes(
            self.length - 1,
            sizes.kv_heads,
            sizes.head_dim,
            getattr(torch, sizes.dtype).itemsize,
            group_size=group_size,
            window_size=window_size,
            batch=sizes.batch,
        )

    def _fetched_bytes(self, fetch_groups: int, fetch_index: str) -> int:
        """Return the bytes of the index, and of the raw tokens instead of their core tokens."""
        sizes = self.sizes
        itemsize = getattr(torch, sizes.dtype).itemsize
        visible = num_visible_cores(self.length - 1, self.group_size, self.window_size)
        index = index_of(fetch_index).num_bytes(self.group_size, sizes.head_dim, itemsize)
        tokens = min(fetch_groups, visible) * (self.group_size - 1)
        token = 2 * sizes.head_dim * itemsize
        return sizes.batch * sizes.kv_heads * (visible * index + tokens * token)

    def layers(self, method: str) -> int:
        """Return the number of layers whose caches take turns."""
        rotate = ROTATE_BYTES[torch.device(self.sizes.device).type]
        return max(1, min(MAX_LAYERS, -(-rotate // self.step_bytes(method))))


def decode_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """Return the methods that can decode."""
    return tuple(method for method in methods if method in ("full", *KERNELS, *DECODING))


def decode_seconds(
    task: DecodeTask,
    methods: Sequence[str],
    *,
    repeats: int,
    budget_s: float,
    on_skip: Callable[[str, str], None],
) -> dict[str, list[float]]:
    """Return the seconds of one step of one layer by method, the methods taking turns.

    Args:
        on_skip: Called with a method and the reason where memory or its kernel refuses.
    """
    device = task.sizes.device
    calls: dict[str, Callable[[], Any]] = {}
    for method in methods:
        num_bytes = task.layers(method) * task.step_bytes("full" if method == "fetch" else method)
        if task.sizes.cuda and num_bytes > FREE_SHARE * torch.cuda.mem_get_info(device)[0]:
            on_skip(method, f"its cache takes {num_bytes / 2**30:.0f} GiB")
            continue
        try:
            calls[method] = _make_call(task, method)
        except (RuntimeError, NotImplementedError) as error:
            on_skip(method, str(error).strip().split("\n")[0][:100] or type(error).__name__)
    samples = sample_in_turns(calls, repeats=repeats, device=device, budget_s=budget_s)
    return {
        method: [x / task.rounds / task.layers(method) for x in seconds]
        for method, seconds in samples.items()
    }


def _make_call(task: DecodeTask, method: str) -> Callable[[], None]:
    """Return a call of task.rounds steps over all layers, which starts by resetting the caches."""
    make = _compact_steps if method in DECODING else _full_steps
    reset, step = make(task, method)
    with torch.no_grad():
        reset()
        if task.sizes.cuda:
            reset, step = capture(reset), capture(step)

    @torch.no_grad()
    def call() -> None:
        reset()
        for _ in range(task.rounds):
            step()

    return call


def _compact_steps(task: DecodeTask, method: str) -> tuple[Callable, Callable]:
    """Return the reset and the step over CCA's layers."""
    q, k, v = make_inputs(1, task.sizes)
    start = task.length - task.rounds
    config = CCAConfig.paper(task.group_size, task.window_size, **DECODING[method])
    layers = [filled_layer(k, start, task.length, config) for _ in range(task.layers(method))]

    def reset() -> None:
        for layer in layers:
            layer.set_length(start)

    def step() -> None:
        for layer in layers:
            layer.attend(q, k, v)

    return reset, step


def _full_steps(task: DecodeTask, method: str) -> tuple[Callable, Callable]:
    """Return the reset and the step over full attention's layers."""
    q, k, v = make_inputs(1, task.sizes)
    caches = [FullCache(k, task.length, method) for _ in range(task.layers(method))]
    position = torch.zeros(1, dtype=torch.long, device=k.device)  # of all layers, as in a model

    def reset() -> None:
        position.fill_(task.length - task.rounds)

    def step() -> None:
        for cache in caches:
            cache.attend(q, k, v, position)
        position.add_(1)

    return reset, step


def filled_layer(like: Tensor, seen: int, max_length: int, config: CCAConfig) -> CompactLayer:
    """Return a compact cache of fixed size with `seen` random tokens, without a prefill.

    Args:
        like: Keys of one step, [B, Hkv, 1, D].
    """
    group_size = config.group_size
    layer = CompactLayer(config, rotary_for(like), max_length=max_length)
    batch, heads, _, dim = like.shape
    entries = layer.ring_size + seen
    if group_size > 1:
        entries = cost.cache_entries(seen, group_size, config.window_size)
    keys, values = torch.randn(2, batch, heads, entries, dim, dtype=like.dtype, device=like.device)
    raw = []
    if config.fetch_groups:
        raw = [torch.randn_like(like.expand(-1, -1, seen, -1)) for _ in range(2)]
    layer.load_state_dict(
        {
            "config": layer.config.to_dict(),
            "rollback": 0,
            "group_size": group_size,
            "seen": seen,
            "intact_from": seen,
            "ended": None,
            "keys": keys,
            "values": values,
            "pad": torch.zeros(batch, dtype=torch.long, device=like.device),
            "store": raw,
        }
    )
    if layer.store is not None:
        layer.store.shrink_window(layer.spec)  # builds the index anew
    return layer


class FullCache:
    """Full attention's cache: keys and values in a static buffer, all of which a step reads."""

    def __init__(self, like: Tensor, length: int, method: str) -> None:
        batch, heads, _, dim = like.shape
        shape = (2, batch, heads, length, dim)
        self.keys, self.values = torch.randn(shape, dtype=like.dtype, device=like.device)
        self._kernel = KERNELS.get(method)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        """Store one token at a position [1] and attend to the whole buffer."""
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        grouped = q.shape[1] != k.shape[1]
        if self._kernel is None:
            return F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=grouped)
        with sdpa_kernel(self._kernel):
            return F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=grouped)


@torch.no_grad()
def check_decode(sizes: Sizes, group_size: int, window_size: int) -> None:
    """Raise AssertionError unless a step of the compact cache agrees with the whole sequence in
    float64."""
    length = window_size + 4 * group_size + 3
    q, k, v = make_inputs(length, sizes._replace(batch=1))
    layer = CompactLayer(CCAConfig.paper(group_size, window_size), rotary_for(q), max_length=length)
    layer.attend(*(x[:, :, :-1] for x in (q, k, v)))
    out = layer.attend(*(x[:, :, -1:] for x in (q, k, v)))[:, :, 0].double()
    wide = (q.double(), k.double(), v.double())
    truth = attend_cca(*wide, group_size, window_size, backend="reference")[:, :, -1]
    error = (out - truth).abs().amax(-1)
    bound = 8 * torch.finfo(q.dtype).eps * truth.abs().amax(-1)
    if not bool((error <= bound).all()):
        raise AssertionError(
            f"decoding is wrong on this machine, nothing was timed: it is off by "
            f"{float(error.max()):.2e}, allowed is {float(bound.min()):.2e}"
        )
