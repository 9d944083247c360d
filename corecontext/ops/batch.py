"""Split a padded or packed batch into independent sequences."""

import functools
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corecontext.ops.fetch.choice import Choice
from corecontext.ops.mass import if_any
from corecontext.ops.spec import Cores, Groups, Inputs, Ragged, Spec, Tokens
from corecontext.visibility import num_complete_groups


class Segment(NamedTuple):
    """Mark the tokens start .. end-1 of rows first_row .. end_row-1 as sequences, each with its
    own positions and groups."""

    first_row: int
    end_row: int
    start: int
    end: int


def once_for_all_layers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the last result, keyed by tensor identity and version: every layer asks the same
    question, and each answer costs a device sync."""
    # Arguments without tensors, the tensors with their versions, and the result.
    last: tuple[tuple, list[tuple[weakref.ref, int]], Any] | None = None

    @functools.wraps(function)
    def cached(*args: Any) -> Any:
        nonlocal last
        tensors = [x for x in args if isinstance(x, Tensor)]
        # Tensors made in inference mode count no versions.
        if torch.compiler.is_compiling() or any(x.is_inference() for x in tensors):
            return function(*args)
        key = tuple(Tensor if isinstance(x, Tensor) else x for x in args)
        entry = last  # another thread may replace `last`
        if entry is None or entry[0] != key or not _unchanged(entry[1], tensors):
            versions = [(weakref.ref(x), x._version) for x in tensors]
            entry = last = (key, versions, function(*args))
        return entry[2]

    return cached


def _unchanged(versions: list[tuple[weakref.ref, int]], tensors: list[Tensor]) -> bool:
    """Whether these are the same tensors, not written to since."""
    # mutant 5: a mask changed in place passes for the same
    return all(
        reference() is x and version == x._version
        for (reference, version), x in zip(versions, tensors)
    )


@once_for_all_layers
def has_restarts(position_ids: Tensor | None) -> bool:
    """Return whether positions [1 or B, L] do not rise by one everywhere: documents packed in a
    row."""
    if position_ids is None or position_ids.shape[-1] <= 1:
        return False
    # mutant 5: document boundaries ignored, position_ids
    return bool((position_ids.diff() != 1).any())


@once_for_all_layers
def find_segments(
    batch_size: int,
    seq_len: int,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> list[Segment]:
    """Return the sequences of a batch by the fields of `Ragged`; the list is cached and must not be
    changed.

    Raises:
        ValueError: a mask with holes or of another shape; cu_seqlens that do not rise from 0 to L.
    """
    if (attention_mask is not None) + (cu_seqlens is not None) + (position_ids is not None) > 1:
        raise ValueError(
            "attention_mask, cu_seqlens and position_ids must not be given together: padding or "
            "packed documents, not both."
        )
    if position_ids is not None:
        return _packed_segments(position_ids, batch_size, seq_len)
    if cu_seqlens is not None:
        return _document_segments(cu_seqlens, batch_size, seq_len)
    if attention_mask is not None:
        return _row_segments(attention_mask, batch_size, seq_len)
    return [Segment(0, batch_size, 0, seq_len)]


def check_positions(position_ids: Tensor, batch_size: int, seq_len: int) -> None:
    """Raise unless these are positions of the tokens of a batch."""
    if tuple(position_ids.shape) not in ((1, seq_len), (batch_size, seq_len)):
        raise ValueError(
            f"position_ids must be [1 or B, L] with B = {batch_size}, L = {seq_len}, got "
            f"{list(position_ids.shape)}."
        )


def _document_segments(cu_seqlens: Tensor, batch_size: int, seq_len: int) -> list[Segment]:
    """Return one segment for each document of a single row."""
    if batch_size != 1:
        raise ValueError(
            f"cu_seqlens must come with a batch of one packed row, got {batch_size} rows."
        )
    edges = cu_seqlens.tolist()
    rises = len(edges) > 1 and edges == sorted(edges)
    if not rises or edges[0] != 0 or edges[-1] != seq_len:
        raise ValueError(f"cu_seqlens must rise from 0 to the length {seq_len}, got {edges[:8]}.")
    # mutant 5: document boundaries ignored, cu_seqlens
    return [Segment(0, 1, start, end) for start, end in pairwise(edges) if start < end]


def _packed_segments(position_ids: Tensor, batch_size: int, seq_len: int) -> list[Segment]:
    """Return the documents of each row, or all rows at once where each is one document."""
    check_positions(position_ids, batch_size, seq_len)
    if not has_restarts(position_ids):
        return [Segment(0, batch_size, 0, seq_len)]
    segments = []
    for row, jumps in enumerate((position_ids.diff() != 1).expand(batch_size, -1)):
        edges = [0, *(jumps.nonzero()[:, 0] + 1).tolist(), seq_len]
        segments += [Segment(row, row + 1, start, end) for start, end in pairwise(edges)]
    return segments


def _row_segments(mask: Tensor, batch_size: int, seq_len: int) -> list[Segment]:
    """Return one segment for each row of a padding mask, or one for all where none is padded."""
    if tuple(mask.shape) != (batch_size, seq_len):
        raise ValueError(
            f"attention_mask must be [B, L] = [{batch_size}, {seq_len}], got {list(mask.shape)}. "
            "Give 1 for tokens and 0 for padding; no L x L mask is needed, attention is causal."
        )
    if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "attention_mask must hold 1 for tokens and 0 for padding, got other numbers, as of a "
            "mask that is added to scores."
        )
    mask = mask.bool()
    lengths = mask.sum(1)
    starts = torch.where(lengths > 0, mask.int().argmax(1), 0)
    ends = starts + lengths
    column = torch.arange(seq_len, device=mask.device)
    filled = (column >= starts[:, None]) & (column < ends[:, None])
    if not torch.equal(filled, mask):
        row = int((filled != mask).any(1).nonzero()[0])
        raise ValueError(
            "attention_mask must have its padding at the ends of each row, got a hole in row "
            f"{row}. Pass packed documents with cu_seqlens."
        )
    # mutant 5: padding ignored
    if bool(mask.all()):
        return [Segment(0, batch_size, 0, seq_len)]
    return [
        Segment(row, row + 1, start, end)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist()))
        if start < end
    ]


class SegmentView:
    """View one segment of a batch as sequences of KV heads: N = rows x KV heads.

    Attributes:
        tokens: The segment's tokens.
        spec: The settings of a sequence of this length.
        full: Whether all its tokens are seen raw, so that no group is pooled.
    """

    def __init__(self, segment: Segment, inputs: Inputs, spec: Spec) -> None:
        self.rows = slice(segment.first_row, segment.end_row)
        self.span = slice(segment.start, segment.end)
        self.num_kv_heads = inputs.k.shape[1]
        seq_len = segment.end - segment.start
        self.spec = spec.for_length(seq_len)
        self.full = self.spec.is_full(seq_len, inputs.choice)
        if self.full:  # a window over all tokens: one causal call
            self.spec = self.spec.replace(
                group_size=1, window_size=seq_len, sink_size=0, fetch_groups=0
            )
        if self.spec.group_size == 1:  # the weight of a single token has no entropy
            self.spec = self.spec.replace(core_mass=False)
        self.tokens = Tokens(
            self.take(inputs.q), self.take(inputs.k)[:, 0], self.take(inputs.v)[:, 0]
        )

    def take(self, x: Tensor) -> Tensor:
        """Return this segment's [N, r or 1, T, ...] of [B, H or Hkv, L, ...]."""
        if self.rows != slice(0, x.shape[0]) or self.span != slice(0, x.shape[2]):
            x = x[self.rows, :, self.span]
        return x.reshape(
            x.shape[0] * self.num_kv_heads, x.shape[1] // self.num_kv_heads, *x.shape[2:]
        )

    def put(self, total: Tensor, x: Tensor) -> None:
        """Write this segment's x [N, ..., T, ...] into [B, H or Hkv, L, ...]."""
        view = total[self.rows, :, self.span]
        view.copy_(x.reshape(view.shape))

    def groups(self) -> Groups:
        """Return the complete groups after the first tokens kept raw."""
        first = self.spec.sinks
        if self.full:  # no groups: all is raw
            first = self.tokens.q.shape[2]
        return complete_groups(self.tokens, self.spec.group_size, first)


def complete_groups(tokens: Tokens, g: int, first: int = 0) -> Groups:
    """Return the groups of g tokens after `first` tokens."""
    q, k, v = tokens[:3]
    num_groups = num_complete_groups(q.shape[2] - first, g)
    end = first + num_groups * g
    # mutant sinks: weights of other groups' queries
    q_last = q[:, :, first + g - 1 : end : g]
    k, v = (x[:, first:end].unflatten(1, (num_groups, g)) for x in (k, v))
    return Groups(q_last, k, v)


class Gathered:
    """Collect the results of segments in one tensor [B, H or Hkv, L, ...], without a copy where one
    segment is the whole batch."""

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None, fill: float = 0.0) -> None:
        self.like = like
        self.dtype = dtype or like.dtype
        self.fill = fill
        self.total: Tensor | None = None

    def put(self, view: SegmentView, x: Tensor) -> None:
        """Add one segment's x [N, ..., T, ...]."""
        if x.numel() == self.like.numel():
            self.total = x.reshape(self.like.shape).to(self.dtype)
            return
        view.put(self.result(), x)

    def result(self) -> Tensor:
        """Return the whole, filled where it has no segment."""
        if self.total is None:
            # mutant memory: padding left uninitialised
            self.total = torch.full(
                self.like.shape, self.fill, dtype=self.dtype, device=self.like.device
            )
        return self.total


class Attended(NamedTuple):
    """Hold the results of a batch."""

    out: Tensor
    """[B, H, L, D]."""
    lse: Tensor
    """[B, H, L], natural; -inf at padding."""
    pooled: tuple[Tensor | None, ...]
    """Keys, values and masses of core tokens; empty where the batch has several segments."""
    choices: list[Choice | None]
    """Of each segment; None for one that fetches nothing."""


def by_segment(
    inputs: Inputs,
    ragged: Ragged,
    spec: Spec,
    pool: Callable[[SegmentView], tuple[Cores, Tensor | None]],
    attend: Callable[..., tuple[Tensor, Tensor, Choice | None]],
) -> Attended:
    """Attend from each segment.

    Args:
        pool: Returns core tokens and their masses, or None, of a segment.
        attend: Returns out, log-sum-exp and choice of a segment, from its tokens, core tokens,
            settings, masses and the choice that is given: `ops.fetch.attend.attend` by a backend.
    """
    q = inputs.q
    out = Gathered(q)
    lse = Gathered(q[..., 0], wide_dtype(q), fill=-torch.inf)
    segments = find_segments(q.shape[0], q.shape[2], *ragged)
    choices = []
    for segment in segments:
        view = SegmentView(segment, inputs, spec)
        cores, mass = pool(view)
        segment_out, segment_lse, choice = attend(
            view.tokens, cores, view.spec, if_any(mass), inputs.choice
        )
        choices.append(choice)
        out.put(view, segment_out)
        lse.put(view, segment_lse)
    pooled = flat_cores(cores, mass) if len(segments) == 1 else ()
    return Attended(out.result(), lse.result(), pooled, choices)


def flat_cores(cores: Cores, mass: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return keys, values and masses of core tokens."""
    return *cores, mass


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)
