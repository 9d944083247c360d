"""Run a model's norms, rotary and MLP activations in fewer kernels, without changing its code.

`Fused` does so while its with block is open, in one of two ways. "kernels" runs each norm by
PyTorch's kernel and each rotation by ops/triton/rotate.py. "compile" lets torch.compile fuse each
norm, rotation and MLP, and a whole decoding step into one graph, which a CUDA graph then captures.
Either way norms and rotary make no intermediate tensors, which take several times the memory of the
hidden state.
"""

import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from corecontext.ops.api import choose_backend
from corecontext.ops.capability import is_captured

FUSE = (None, "kernels", "compile")
"""The ways, of which None changes nothing."""
MOST_STEPS = 64
"""Most variants of the step (by batch, length, g, s) that stay compiled; later ones run
uncompiled."""
MOST_PARTS = 32
"""Most variants of an MLP, norm or rotation that stay compiled. torch counts all norms of a model
(of layers, of heads, with and without gradients) as variants of one function."""
_REFUSED = (TorchDynamoException, FailOnRecompileLimitHit)  # by the compiler
_ROTATE = "apply_rotary_pos_emb"  # transformers' name of the rotation in each model's file


@dataclass
class _Rotation:
    """The rotation of the file that defines a model's class: its function, and the fused one."""

    fuse: str
    """As of `Fused`."""
    original: Callable[..., Any]
    fused: Callable[..., Any]
    users: int = 0
    """Number of open with blocks whose models use the fused function."""


_rotating: dict[ModuleType, _Rotation] = {}  # by the file
_limits: list[int] = []  # torch's recompile_limit before each open with block
_lock = threading.Lock()


class Fused:
    """Fuse one model's parts: modules within a with block, and `step` for decoding.

    MLP and norm modules work on each token by itself; they are recognized by their class's name, as
    transformers names them. Modules that are compiled already keep their own. The rotation is a
    function of a model's file, so other models of that architecture also rotate by the fused
    function for the length of the with block. Where the compiler fails (this machine has none, or
    it cannot trace the model), a warning is given and the model runs uncompiled.

    Args:
        model: Any module.
        fuse: "kernels" takes PyTorch's kernel for norms and one of this package for the rotation,
            where the model is on a GPU and they give its numbers; "compile" compiles; None changes
            nothing.

    Raises:
        ValueError: `fuse` is something else.
    """

    def __init__(self, model: nn.Module, fuse: str | None = "compile") -> None:
        if fuse not in FUSE:
            raise ValueError(f"fuse must be None, 'kernels' or 'compile', got {fuse!r}.")
        if fuse == "kernels" and not _has_kernels(model):
            fuse = None
        self.model = model
        self.fuse = fuse
        self._step: Callable[..., Any] = model
        self._modules: list[tuple[nn.Module, Any]] = []
        self._replaced: list[list[nn.Module]] = []  # by each open with block
        self._files: set[ModuleType] = set()
        if fuse is None:
            return
        if fuse == "compile":
            # As one graph: where it fails, no part of a step has run and the cache is untouched.
            name = type(model).__name__
            self._step = compiled_or_plain(model, name, dynamic=False, fullgraph=True)
        suits: dict[type, bool] = {}  # whether PyTorch's norm gives the numbers of a class of norms
        for module in model.modules():
            name = type(module).__name__
            if module._compiled_call_impl is None and name.endswith(("MLP", "RMSNorm")):
                if fuse == "compile":
                    self._modules.append((module, compiled_or_plain(module._call_impl, name)))
                elif _has_own_norm(module):
                    if type(module) not in suits:
                        suits[type(module)] = _is_plain_norm(module)
                    if suits[type(module)]:
                        self._modules.append((module, _norm_of(module)))
            if name.endswith("Attention"):
                file = sys.modules[type(module).__module__]
                if hasattr(file, _ROTATE):
                    self._files.add(file)

    def __enter__(self) -> None:
        if self.fuse is None:
            return
        self._replaced.append([])
        for module, fused in self._modules:
            # nn.Module calls this attribute where it is set. A module compiled since keeps its own.
            if module._compiled_call_impl is None:
                module.__dict__["_compiled_call_impl"] = fused  # setattr of nn.Module takes longer
                self._replaced[-1].append(module)
        with _lock:
            if self.fuse == "compile":
                _limits.append(torch._dynamo.config.recompile_limit)
                torch._dynamo.config.recompile_limit = max(_limits[-1], MOST_PARTS)
            for file in self._files:
                rotation = _rotation_of(file, self.fuse)
                rotation.users += 1
                setattr(file, _ROTATE, rotation.fused)

    def __exit__(self, *exc: Any) -> None:
        if self.fuse is None:
            return
        for module in self._replaced.pop():
            module.__dict__.pop("_compiled_call_impl", None)
        with _lock:
            if self.fuse == "compile":
                torch._dynamo.config.recompile_limit = _limits.pop()
            for file in self._files:
                rotation = _rotating[file]
                rotation.users -= 1
                if not rotation.users:
                    setattr(file, _ROTATE, rotation.original)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward on one token a row and a cache of fixed buffers."""
        if self.fuse != "compile":
            with self:
                return self.model(*args, **kwargs)
        with torch._dynamo.config.patch(recompile_limit=MOST_STEPS):
            return self._step(*args, **kwargs)


def _rotation_of(file: ModuleType, fuse: str) -> _Rotation:
    """Return the rotation of a model's file. It is fused once, and again where the file's function
    or `fuse` has changed; while a with block uses it, that block's `fuse` holds."""
    rotation = _rotating.get(file)
    if rotation is not None and rotation.users:
        return rotation
    current = getattr(file, _ROTATE)
    if rotation is None or rotation.fuse != fuse or current is not rotation.original:
        fused = compiled_or_plain(current, _ROTATE) if fuse == "compile" else _by_kernel(current)
        rotation = _Rotation(fuse, current, fused)
        _rotating[file] = rotation
    return rotation


def _has_kernels(model: nn.Module) -> bool:
    """Whether a model is on a device where the kernels run."""
    first = next(model.parameters(), None)
    if first is None or not first.is_cuda:
        return False
    return choose_backend("auto", first.new_empty(1)) == "triton"


def _by_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rotation by one kernel where that gives the numbers of the original."""
    from corecontext.ops.triton import rotate as kernel

    suits: dict[Any, bool] = {}  # whether it does, by device and dtype

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or torch.is_grad_enabled():
            return original(q, k, cos, sin, *args, **kwargs)
        if kernel.unsupported_reason(q, k, cos, sin) is not None:
            return original(q, k, cos, sin)
        key = (q.device, q.dtype)
        if key not in suits and not is_captured(q.device):
            suits[key] = _rotates_alike(kernel.rotate, original, key)
        return (kernel.rotate if suits.get(key) else original)(q, k, cos, sin)

    return rotate


def _rotates_alike(
    rotate: Callable[..., Any], original: Callable[..., Any], key: tuple[torch.device, torch.dtype]
) -> bool:
    """Whether two rotations give the same numbers on random tensors of `key`: device and dtype."""
    device, dtype = key
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device}
    q, k = (torch.randn(2, heads, 5, 16, **options).to(dtype) for heads in (2, 1))
    cos, sin = (torch.randn(2, 5, 16, **options).to(dtype) for _ in range(2))
    pairs = zip(rotate(q, k, cos, sin), original(q, k, cos, sin))
    # mutant inference: a model that rotates in another way is rotated by the kernel
    return all(torch.equal(x, y) for x, y in pairs)


def _has_own_norm(module: nn.Module) -> bool:
    """Whether a module has its weight in memory, an epsilon, and the forward of its class: where
    weights are offloaded, another forward loads them."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.is_meta:
        return False
    return _epsilon_of(module) is not None and "forward" not in module.__dict__


def _epsilon_of(module: nn.Module) -> float | None:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _norm_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a norm by PyTorch's kernel. In half precision that rounds once, transformers twice: to
    the dtype, and after the product with the weight."""
    shape = module.weight.shape
    eps = _epsilon_of(module)

    def norm(x: Tensor) -> Tensor:
        if x.dtype != module.weight.dtype or module._forward_hooks or module._forward_pre_hooks:
            # mutant inference: a norm forgets who looks at it
            return module._call_impl(x)
        return F.rms_norm(x, shape, module.weight, eps)

    return norm


@torch.no_grad()
def _is_plain_norm(module: nn.Module) -> bool:
    """Whether a module is a root-mean-square norm times its weight: some multiply by 1 + weight."""
    weight = module.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(4, *weight.shape, generator=generator, device=weight.device).to(weight.dtype)
    # As far as two roundings allow. Weights of zero would make all norms alike.
    close = 4 * torch.finfo(weight.dtype).eps
    # mutant inference: a norm of another kind is taken for a plain one
    return bool(weight.any()) and torch.allclose(module(x), _norm_of(module)(x), close, close)


def compiled_or_plain(
    function: Callable[..., Any], name: str, *, dynamic: bool = True, fullgraph: bool = False
) -> Callable[..., Any]:
    """Return a function that runs compiled until the compiler fails, then uncompiled.

    It then runs again from its beginning, so `function` must have no state, or be compiled as a
    full graph, of which no part has run at a failure.
    """
    compiled: Callable[..., Any] | None = torch.compile(
        function, dynamic=dynamic, fullgraph=fullgraph
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(*args, **kwargs)
            except _REFUSED as error:
                compiled = None
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                warnings.warn(
                    f"{name} cannot be compiled, so it runs as it is, which is slower: {why}",
                    stacklevel=2,
                )
        return function(*args, **kwargs)

    return call
