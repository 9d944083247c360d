"""Send tensors for context parallelism: three kinds of exchange over one process group, with a
count of the bytes received."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed by newer releases.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wire:
    """Communicate within one process group. `received_bytes` counts the bytes that arrive here from
    other processes, in collectives as a ring algorithm moves them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.received_bytes = 0

    def gather(self, x: Tensor) -> Gathering:
        """Start to collect a tensor [...] of each process, all of one shape: [processes, ...]."""
        gathered = x.new_empty(self.size, *x.shape)
        self.received_bytes += (self.size - 1) * x.nbytes
        x = x.contiguous()
        work = _all_gather(gathered.flatten(0, 1), x, group=self.group, async_op=True)
        return Gathering(gathered, work)

    def scatter_sum(self, x: Tensor) -> Gathering:
        """Start to sum tensors [processes, ...] of all processes; process i gets row i of it."""
        total = torch.empty_like(x[0])
        self.received_bytes += (self.size - 1) * total.nbytes
        x = x.flatten(0, 1).contiguous()
        work = _reduce_scatter(total, x, group=self.group, async_op=True)
        return Gathering(total, work, x)

    def exchange(self, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]) -> None:
        """Send and receive tensors of (rank, tensor) pairs, received ones in place; between two
        processes in the order of the lists."""
        operation = functools.partial(dist.P2POp, group=self.group)
        operations = [operation(dist.isend, x.contiguous(), group_peer=rank) for rank, x in sent]
        operations += [operation(dist.irecv, x, group_peer=rank) for rank, x in received]
        self.received_bytes += sum(x.nbytes for _, x in received)
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()


class Gathering:
    """Hold the result of a collective that has started."""

    def __init__(self, result: Tensor, work: dist.Work, source: Tensor | None = None) -> None:
        self._result = result
        self._work = work
        self._source = source  # must live until it is sent

    def wait(self) -> Tensor:
        """Return the result once it has arrived; on a GPU at once, and kernels launched from now on
        wait for it."""
        self._work.wait()
        return self._result
