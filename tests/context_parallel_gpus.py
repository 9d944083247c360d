"""One process of test_context_parallel.py::test_gpus_equal_one, started by torchrun: the operator
over NCCL."""

import os

import torch
import torch.distributed as dist

from corecontext import Rotary, cca_attention
from corecontext.distributed.context_parallel import Shard, context_parallel_attention
from corecontext.distributed.layout import Layout
from corecontext.distributed.wire import Wire
from corecontext.ops.spec import Inputs, Spec


def main() -> None:
    """Check this process, on its GPU."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    attended()
    dist.destroy_process_group()


def attended() -> None:
    """Output and gradients of this process's part equal those of the whole sequence on this GPU."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dim, dtype, bound, groups in ((64, torch.float32, 1e-5, 8), (128, torch.bfloat16, 2e-2, 0)):
        length, generator = 1500 * world + 37, torch.Generator("cuda").manual_seed(0)
        q, k, v, grad = (
            torch.randn(1, heads, length, dim, generator=generator, device="cuda", dtype=dtype)
            for heads in (4, 2, 2, 4)
        )
        settings = {
            "group_size": 16,
            "window_size": 300,
            "rotary": Rotary.from_theta(1e4, dim, "cuda"),
            "fetch_groups": groups,
        }
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = cca_attention(*whole, **settings)
        expected.backward(grad)
        layout = Layout.balanced(length, world, rank)
        mine = [layout.take(x, 2).clone().requires_grad_() for x in (q, k, v)]
        shard = Shard(Wire(dist.group.WORLD), layout, ())
        spec = Spec(scale=dim**-0.5, **settings)
        out = context_parallel_attention(Inputs(*mine), shard, spec)
        out.backward(layout.take(grad, 2))
        for name, got, want in [
            ("out", out, expected),
            *((n, a.grad, b.grad) for n, a, b in zip("qkv", mine, whole)),
        ]:
            want = layout.take(want, 2).double()
            error = float((got.double() - want).norm() / want.norm())
            assert error < bound, f"{name} of rank {rank} in {dtype}: {error:.1e}"


if __name__ == "__main__":
    main()
