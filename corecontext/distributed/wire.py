"""What context parallelism sends: three kinds of exchange over one process group, and how many
bytes came in."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # renamed by newer releases
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wire:
    """One process's end of a group. `received_bytes` counts what others sent here, as a ring
    algorithm moves it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.received_bytes = 0

    def gather(self, own: Tensor) -> Gathering:
        """Start to collect every process's tensor, all of one shape; the result's first dimension
        is the process."""
        every = own.new_empty(self.size, *own.shape)
        self.received_bytes += (self.size - 1) * own.nbytes
        return Gathering(
            every,
            _all_gather(every.flatten(0, 1), own.contiguous(), group=self.group, async_op=True),
        )

    def scatter_sum(self, every: Tensor) -> Gathering:
        """Start to send every[i] to process i, which gets the sum over all processes."""
        own = torch.empty_like(every[0])
        self.received_bytes += (self.size - 1) * own.nbytes
        every = every.flatten(0, 1).contiguous()
        work = _reduce_scatter(own, every, group=self.group, async_op=True)
        return Gathering(own, work, every)

    def exchange(self, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]) -> None:
        """Send and receive whole tensors; between two processes in the order of the lists."""
        operations = [
            dist.P2POp(dist.isend, x.contiguous(), self._peer(rank), self.group) for rank, x in sent
        ]
        operations += [
            dist.P2POp(dist.irecv, x, self._peer(rank), self.group) for rank, x in received
        ]
        self.received_bytes += sum(x.nbytes for _, x in received)
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def _peer(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)


class Gathering:
    """A collective under way."""

    def __init__(self, result: Tensor, work: dist.Work, source: Tensor | None = None) -> None:
        self._result, self._work, self._source = (
            result,
            work,
            source,
        )  # the source must live until it is sent

    def wait(self) -> Tensor:
        """The result, once it is here (on a GPU: for what is launched from now on)."""
        self._work.wait()
        return self._result
