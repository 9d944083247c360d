"""Hold few tokens as full attention reads them, before a growing cache has a compact form.

While prompts and steps attend to all raw tokens (ops/fetch/prompt_rule.py) nothing else is needed:
neither ring, core tokens nor index, whose buffers take a layer longer to make than to attend. The
queries of groups' last tokens are kept, so that core tokens can be made later (late.py).
"""

import torch
from torch import Tensor

from corecontext.cache.full import attend_causally, step_on_all
from corecontext.ops.spec import Spec


class WholeRows:
    """Keys and values of rows of one length without padding, and the queries that pooling needs."""

    def __init__(self, most: int) -> None:
        self.most = most
        """Tokens of a row up to which rows stay whole."""
        self.buffers: list[Tensor] = []
        """Keys and values [B, Hkv, room, D]; what is behind `length` was never written."""
        self.length = 0
        """Tokens of a row."""
        self.appended = 0
        """Of these, those up to the last append that was no step."""
        self.queries: list[Tensor] = []
        """[B, H, groups, D] each, of the last tokens of all groups so far, in order."""

    @property
    def tokens(self) -> list[Tensor]:
        """Keys and values [B, Hkv, length, D]."""
        return [x.narrow(2, 0, self.length) for x in self.buffers]

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return sum(x.numel() * x.element_size() for x in self.tokens)

    @torch.compiler.disable
    def append(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec, planned: int) -> Tensor:
        """Append n tokens to each row, and attend from them.

        Args:
            q: [B, H, n, D]. k, v: [B, Hkv, n, D].
            planned: Tokens of a row that will come in all, as far as that is known.

        Returns:
            [B, H, n, D].
        """
        start = self.length
        end = start + q.shape[2]
        self._make_room((k, v), end, planned)
        for buffer, x in zip(self.buffers, (k, v)):
            buffer.narrow(2, start, q.shape[2]).copy_(x)
        if start:
            k, v = (x.narrow(2, 0, end) for x in self.buffers)
        out = attend_causally(q, k, v, spec.scale)
        # The last tokens of groups among the new ones: the first, then every g-th.
        g = spec.group_size
        new_sinks = max(0, spec.sinks - start)
        last = new_sinks + (spec.sinks - 1 - start - new_sinks) % g
        if last < q.shape[2]:
            self.queries.append(q[:, :, last::g].clone())
        self.length = self.appended = end
        return out

    def step(self, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """Append a token to each row, and attend from it, as `append`."""
        end = self.length + 1
        self._make_room((k, v), end, 0)
        lengths = (self.length, None, [0])
        out = step_on_all(self.buffers, (q, k, v), lengths, (spec.scale, None), "torch")
        if end > spec.sinks and end % spec.group_size == 0:
            self.queries.append(q.clone())
        self.length = end
        return out

    def _make_room(self, like: tuple[Tensor, Tensor], length: int, planned: int) -> None:
        """Make room for so many tokens of a row; more than asked for, so that steps rarely copy."""
        if self.buffers and length <= self.buffers[0].shape[2]:
            return
        room = max(planned, length + max(64, length // 4))
        larger = [x.new_empty((*x.shape[:2], room, x.shape[3])) for x in like]
        for buffer, x in zip(larger, self.tokens):
            buffer.narrow(2, 0, self.length).copy_(x)
        self.buffers = larger
