"""Attend to sinks and a window in whole prompts by plain causal attention, without masks.

A prompt is cut into chunks of s tokens, the window's size. Query i of a chunk sees tokens 0 to i of
its chunk, and i + 1 to s - 1 of the chunk before. Read backwards, the latter is causal attention,
too. Time and memory grow linearly with the length, forward and backward.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.ops import partial
from corecontext.ops.merge import merge
from corecontext.ops.spec import Upstream


class Prompt(NamedTuple):
    """The tensors of whole prompts, of N = B x Hkv KV heads with r query heads each: three for the
    window, then three for the sinks."""

    q: Tensor
    """[N, r, L, D]."""
    k: Tensor
    """[N, 1, L, D], as v."""
    v: Tensor
    sink_q: Tensor
    """The queries from slot `window_size` on, rotated for the sinks, [N, r, L - s, D]."""
    sink_k: Tensor
    """[N, 1, n, D], as sink_v."""
    sink_v: Tensor


def attend(prompt: Prompt, window_size: int, scale: float) -> Tensor:
    """Let each query see its nearest `window_size` tokens, and the sinks that have left that
    window: [N, r, L, D], for L > window_size."""
    return _Attend.apply(*prompt, window_size, scale)


class _Triangle(NamedTuple):
    """Queries and keys of tensors [N, chunks, heads, s, ...], of which query i sees keys 0 to i."""

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    """Of keys and values."""
    is_backwards: bool
    """Whether the last token of a chunk is read first."""

    @property
    def slices(self) -> tuple[tuple[slice, ...], ...]:
        """Those of queries, keys and values."""
        return self.queries, self.keys, self.keys

    def read(self, x: Tensor, at: tuple[slice, ...]) -> Tensor:
        """Return the triangle's queries or keys, [N x chunks, heads, s or s - 1, ...]."""
        x = x[at]
        if self.is_backwards:
            # mutant baselines: the chunk before a query's is read forwards
            x = x.flip(3)
        return x.flatten(0, 1)

    def unread(self, x: Tensor, like: Tensor) -> Tensor:
        """Undo `read`: return x in the order and the shape of `like`."""
        x = x.unflatten(0, like.shape[:2])
        if self.is_backwards:
            x = x.flip(3)
        return x


_ALL = slice(None)
_NOT_FIRST = slice(1, None)
_NOT_LAST = slice(None, -1)
_OWN = _Triangle((_ALL,), (_ALL,), is_backwards=False)
"""Each chunk with itself."""
_BEFORE = _Triangle(
    (_ALL, _NOT_FIRST, _ALL, _NOT_LAST), (_ALL, _NOT_LAST, _ALL, _NOT_FIRST), is_backwards=True
)
"""Each chunk with the one before: query i and keys i + 1 to s - 1."""


class _Attend(torch.autograd.Function):
    """Merge the two triangles and the sinks; the backward of each takes the merged results."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        prompt = Prompt(*args[:6])
        window_size, scale = args[6:]
        tokens = [_chunks(x, window_size) for x in prompt[:3]]
        out = torch.empty_like(tokens[0])
        lse = out.new_empty(out.shape[:-1], dtype=torch.promote_types(out.dtype, torch.float32))
        scoring = partial.Scoring(scale, is_causal=True)
        for triangle in _triangles(window_size):
            results = partial.forward(*_read(triangle, tokens), scoring)
            views = [x[triangle.queries] for x in (out, lse)]
            results = [triangle.unread(x, view) for x, view in zip(results, views)]
            _write(views, results, is_first=triangle is _OWN)
        length = prompt.q.shape[2]
        out, lse = (_joined(x, length) for x in (out, lse))
        if prompt.sink_k.shape[2]:
            results = partial.forward(*prompt[3:], _sink_scoring(prompt, scale))
            _write([x[:, :, window_size:] for x in (out, lse)], results, is_first=False)
        ctx.window_size = window_size
        ctx.scale = scale
        ctx.save_for_backward(*prompt, out, lse)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        prompt = Prompt(*tensors)
        upstream = Upstream(grad_out, grad_lse=None, out=out, lse=lse)
        chunked_upstream = upstream.map(lambda x: _chunks(x, ctx.window_size))
        tokens = [_chunks(x, ctx.window_size) for x in prompt[:3]]
        grads = [torch.zeros_like(x, dtype=lse.dtype) for x in tokens]
        for triangle in _triangles(ctx.window_size):
            triangle_upstream = chunked_upstream.map(
                lambda x, triangle=triangle: triangle.read(x, triangle.queries)
            )
            scoring = partial.Scoring(ctx.scale, is_causal=True)
            results = partial.backward(triangle_upstream, *_read(triangle, tokens), scoring)
            for grad, at, result in zip(grads, triangle.slices, results):
                view = grad[at]
                view += triangle.unread(result, view)
        length = out.shape[2]
        grads = [_joined(x, length).to(out.dtype) for x in grads]
        sink_grads: tuple[Tensor | None, ...] = (None, None, None)
        if prompt.sink_k.shape[2]:
            sink_upstream = upstream.rows(slice(ctx.window_size, None))
            scoring = _sink_scoring(prompt, ctx.scale)
            sink_grads = partial.backward(sink_upstream, *prompt[3:], scoring)
            sink_grads = tuple(x.to(out.dtype) for x in sink_grads)
        return *grads, *sink_grads, None, None


def _triangles(window_size: int) -> tuple[_Triangle, ...]:
    """Return the triangles of a window; that of one token is in its query's chunk."""
    return (_OWN, _BEFORE) if window_size > 1 else (_OWN,)


def _read(triangle: _Triangle, tokens: list[Tensor]) -> list[Tensor]:
    """Return the queries, keys and values of a triangle."""
    return [triangle.read(x, at) for x, at in zip(tokens, triangle.slices)]


def _write(views: list[Tensor], results: Any, is_first: bool) -> None:
    """Write [output, log-sum-exp] into views of all queries' results; later parts are merged."""
    if not is_first:
        results = merge(*([view, result] for view, result in zip(views, results)))
    for view, result in zip(views, results):
        view.copy_(result)


def _chunks(x: Tensor, window_size: int) -> Tensor:
    """Cut x [N, heads, L, ...] into [N, chunks, heads, s, ...]. Zeros at the end fill the last
    chunk: no query of the prompt sees them."""
    missing = -x.shape[2] % window_size
    padding = (0, 0) * (x.dim() - 3) + (0, missing)
    return F.pad(x, padding).unflatten(2, (-1, window_size)).transpose(1, 2).contiguous()


def _joined(x: Tensor, length: int) -> Tensor:
    """Undo `_chunks`."""
    return x.transpose(1, 2).flatten(2, 3)[:, :, :length]


def _sink_scoring(prompt: Prompt, scale: float) -> partial.Scoring:
    """Let each query see the sinks that have left its window."""
    rows = torch.arange(prompt.sink_q.shape[2], device=prompt.q.device)
    slots = torch.arange(prompt.sink_k.shape[2], device=prompt.q.device)
    mask = partial.as_mask(rows[:, None] >= slots, prompt.q)
    return partial.Scoring(scale, mask=mask)
