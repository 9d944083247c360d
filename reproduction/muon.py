"""Update all matrices of one shape at once with Muon, in a fiftieth of PyTorch's launches."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch.optim.Muon (Nesterov momentum, adjust_lr_fn="match_rms_adamw") with the same state.

    A small model has dozens of small matrices, each of which takes about 35 kernels that leave a
    GPU idle.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update every parameter with a gradient."""
        assert closure is None
        for group in self.param_groups:
            assert group["nesterov"] and group["adjust_lr_fn"] == "match_rms_adamw"
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                grads = [p.grad for p in params]
                for p in params:
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                momenta = [self.state[p]["momentum_buffer"] for p in params]
                torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
                updates = orthogonal(
                    torch.stack(torch._foreach_lerp(grads, momenta, group["momentum"])),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                lr = torch.as_tensor(group["lr"], device=updates.device)
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
                updates = updates.to(params[0].dtype) * (-0.2 * math.sqrt(max(shape)) * lr)
                torch._foreach_add_(params, list(updates.unbind()))


def orthogonal(
    updates: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Bring the singular values of matrices [n, A, B] near one (Newton-Schulz, bfloat16)."""
    a, b, c = coefficients
    x = updates.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
