"""Attend with CCA on one sequence that several processes hold in contiguous chunks.

Per layer a process receives the core tokens of all others, L / g, and the few raw tokens before its
chunks: about 1 / g of ring attention's keys and values (benchmarks/traffic.py counts both).
attention.py has the computation; fetch.py that of fetch, for which all raw tokens travel.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from corecontext.distributed import fetch, first_tokens
from corecontext.distributed.attention import attend
from corecontext.distributed.call import Call
from corecontext.distributed.halo import Halo, Shape
from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Wire
from corecontext.ops import api
from corecontext.ops.head_split import check_sizes, gather_heads, heads_of_each, split_inputs
from corecontext.ops.spec import Inputs, Spec


@dataclass(frozen=True)
class Shard:
    """Describe the part of a sequence that one process holds: communicator, layout, documents."""

    wire: Wire
    layout: Layout
    documents: tuple[int, ...] = ()
    """Boundaries 0, ..., L of documents packed in the sequence, which do not see each other; () for
    one document."""

    def __post_init__(self) -> None:
        edges = self.documents
        if self.layout.rank != self.wire.rank or max(self.layout.owners) >= self.wire.size:
            raise ValueError(
                f"layout must be of process {self.wire.rank} of {self.wire.size}, got rank "
                f"{self.layout.rank} and owners {self.layout.owners}."
            )
        rising = all(a < b for a, b in pairwise(edges))
        if edges and not (rising and edges[0] == 0 and edges[-1] == self.layout.seq_len):
            raise ValueError(
                f"documents must rise from 0 to the length {self.layout.seq_len}, got {edges[:8]}."
            )


@torch.compiler.disable  # the exchanges are Python
def context_parallel_attention(
    inputs: Inputs, shard: Shard, spec: Spec, backend: str = "auto"
) -> Tensor:
    """Run `cca_attention` on the whole sequence, for the tokens of this process. A collective call.

    Args:
        inputs: Queries, keys and values of this process's tokens, [B, H or Hkv, T, D], rotary
            applied at their positions in their document; the layout gives this process T tokens.
        spec, backend: The same on every process.

    Returns:
        [B, H, T, D] in the dtype of q; differentiable in q, k and v, whose gradients are those of
        the sum of all processes' losses, so every process must call backward.

    Raises:
        ValueError: a setting breaks a rule, or the layout does not fit the inputs.
        NotImplementedError: backend="reference", which has no backward in parts, or fetch_share
            above 1: neighbouring queries may be on several processes.
    """
    q, k, v = inputs[:3]
    _check(inputs, shard, spec)
    (q, k, v), context = api.outside_autocast(q, k, v)
    if api.choose_backend(backend, q) == "reference":
        raise NotImplementedError(
            "backend 'reference' cannot run context parallelism. Use backend='packed'."
        )
    inputs = Inputs(q, k, v)
    with context:
        if not isinstance(spec.group_size, tuple):
            return _by_document(inputs, shard, spec, backend)
        sizes, heads = heads_of_each(spec.group_size)
        outs = [
            _by_document(inputs_of_g, shard, spec.replace(group_size=g), backend)
            for g, inputs_of_g in zip(sizes, split_inputs(inputs, heads))
        ]
        return gather_heads(outs, heads)


def _check(inputs: Inputs, shard: Shard, spec: Spec) -> None:
    """Raise unless the inputs are the tokens that the layout gives this process, and the settings
    can run on several."""
    q, k = inputs[:2]
    layout = shard.layout
    if spec.fetch_groups and spec.fetch_share > 1:
        raise NotImplementedError(
            f"fetch_share must be 1 in context parallelism, got {spec.fetch_share}: neighbours may "
            "be on several processes."
        )
    if isinstance(spec.group_size, tuple):
        check_sizes(spec.group_size, k.shape[1], spec.num_groups)
    count = sum(layout.lengths[i] for i in layout.chunks())
    if q.shape[2] != count or k.shape[2] != count:
        raise ValueError(
            f"q and k must hold the {count} tokens that the layout gives process {layout.rank}, "
            f"got {q.shape[2]} and {k.shape[2]}."
        )


def _by_document(inputs: Inputs, shard: Shard, spec: Spec, backend: str) -> Tensor:
    """Attend within each document. A document on several processes is a collective call of all
    processes, those without a token of it included."""
    tokens = inputs[:3]
    run = functools.partial(_attend_document, inputs, shard, spec, backend)
    if len(shard.documents) <= 2:  # a single document
        return run(shard.layout, tokens)
    layout = shard.layout
    # The place of each chunk among this process's tokens.
    chunks = layout.chunks()
    offsets = dict(zip(chunks, accumulate((layout.lengths[i] for i in chunks), initial=0)))
    # Results, each behind the place of its first token among this process's tokens.
    pieces: list[tuple[int, Tensor]] = []
    for start, end in pairwise(shard.documents):
        document = layout.clip(start, end)
        touched = document.chunks()
        if not touched and not document.is_shared:
            continue
        # A process without a token of it takes part with none: an empty span at 0.
        places = [offsets[i] + max(0, start - layout.starts[i]) for i in touched] or [0]
        lengths = [document.lengths[i] for i in touched] or [0]
        spans = [slice(place, place + length) for place, length in zip(places, lengths)]
        out = run(document, [torch.cat([x[:, :, span] for span in spans], 2) for x in tokens])
        pieces += zip(places, out.split(lengths, 2))
    if not pieces:
        # This process has no token, and no document is on several: its empty result depends on all
        # inputs, so that each gets a gradient.
        q, k, v = tokens
        return q + (k.sum() + v.sum())
    return torch.cat([out for _, out in sorted(pieces, key=lambda piece: piece[0])], 2)


def _attend_document(
    inputs: Inputs, shard: Shard, spec: Spec, backend: str, layout: Layout, tokens: Sequence[Tensor]
) -> Tensor:
    """Attend within one document of this layout, of which this process holds the queries, keys and
    values `tokens`, [B, H or Hkv, T, D] each."""
    q, k, v = tokens
    if not layout.is_shared:
        out, _ = api.attend(inputs._replace(q=q, k=k, v=v), spec, backend=backend)
        return out
    spec = spec.for_length(layout.seq_len)
    if spec.fetch_groups and spec.group_size > 1:
        call = fetch.FetchCall(shard.wire, layout, spec, api.backend_module(backend, q))
        return fetch.attend(q, k, v, call)
    # The first tokens are on every process; those after them are a sequence of their own.
    n = min(spec.sinks, layout.seq_len)
    first = None
    outs = []
    if n:
        among = layout.clip(0, n)
        count = sum(among.lengths[i] for i in among.chunks())
        first = first_tokens.gather(k[:, :, :count], v[:, :, :count], among, shard.wire)
        positions = among.positions(q.device)[0]
        outs.append(first_tokens.attend(q[:, :, :count], first, positions, spec))
        q, k, v = (x[:, :, count:] for x in (q, k, v))
        layout = layout.clip(n, layout.seq_len)
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3])
    halo = Halo(shard.wire, layout, spec.replace(sink_size=0), shape)
    call = Call(halo, api.backend_module(backend, q))
    outs.append(attend(q, k, v, call, first))
    return torch.cat(outs, 2)
