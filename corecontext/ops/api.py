"""The public operators: signatures, validation and the choice of a backend; no arithmetic."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.config import (
    BACKENDS,
    DEFAULT_GROUP_SIZE,
    DEFAULT_WINDOW_SIZE,
    CCAConfig,
    check_choice,
)
from corecontext.ops import autograd, packed, reference, rules
from corecontext.ops.batch import has_restarts
from corecontext.ops.head_split import check_sizes, gather_heads, heads_of_each, split_inputs
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import EACH_ROW, Groups, Inputs, Ragged, Spec, check_rotary
from corecontext.visibility import is_full_attention, num_complete_groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_AUTO_TRITON = (
    torch.bfloat16,
    torch.float16,
)  # in float32 the matrix products of cuBLAS, so `packed`, are faster


def choose_backend(backend: str, q: Tensor) -> str:
    """The name of the backend that takes this call; an explicit request never falls back."""
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        if (
            q.device.type == "cuda"
            and q.dtype in _AUTO_TRITON
            and _unsupported_reason("triton", q) is None
        ):
            return "triton"
        return "packed" if packed.unsupported_reason(q) is None else "reference"
    reason = _unsupported_reason(backend, q)
    if reason is not None:
        other = "packed" if backend == "triton" else "reference"
        raise NotImplementedError(
            f"backend {backend!r} cannot run this call: {reason}. Use backend={other!r}."
        )
    return backend


def _unsupported_reason(backend: str, q: Tensor) -> str | None:
    """Why a backend cannot take the call, or None."""
    if backend == "triton" and not _has_triton():
        return "the package triton is not installed"
    return autograd.module_of(backend).unsupported_reason(q) if backend != "reference" else None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def backend_module(backend: str, q: Tensor) -> ModuleType:
    """The module with `pool` and `attend` that takes this call."""
    chosen = choose_backend(backend, q)
    return reference if chosen == "reference" else autograd.module_of(chosen)


def outside_autocast(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], AbstractContextManager]:
    """The inputs in the dtype that autocast would give attention, and a context in which it changes
    nothing more.

    Inside, pooling weights and merges must stay in float32; autocast would turn their products to
    half precision.
    """
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return (q, k, v), contextlib.nullcontext()
    dtype = torch.get_autocast_dtype(device)
    cast = tuple(x.to(dtype) if x.dtype != torch.float64 else x for x in (q, k, v))
    return cast, torch.autocast(device, enabled=False)


def cca_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group_size: int | Sequence[int] = DEFAULT_GROUP_SIZE,
    window_size: int = DEFAULT_WINDOW_SIZE,
    num_groups: int | None = None,
    pooling: str = "cca",
    core_position: str = "middle",
    core_heads: str = "kv",
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    core_bias: float | Tensor | None = None,
    learned: Mapping[str, Tensor] | None = None,
    sink_size: int = 0,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to core tokens of the far past and raw tokens of the near past in one causal softmax.

    docs/math.md, eq. 1 to 5. Every earlier token is seen once: as itself, or through its group's
    core token.

    Args:
        q: Queries, [B, H, L, D]; float32, bfloat16, float16 or float64; rotary applied.
        k, v: Keys (rotary applied) and values, [B, Hkv, L, D], Hkv dividing H.
        group_size: Tokens per core token (g), >= 1, or one for each KV head. With 1 this is full
            attention.
        window_size: Nearest tokens seen uncompressed (s), >= 1.
        num_groups: Constant number of groups; replaces group_size by max(1, ceil((L - s) /
            num_groups)).
        pooling: "cca", "mean", "max" or "mean_query".
        core_position: "middle" turns core keys to their group's middle position and needs `rotary`;
            "token" pools the keys as they are.
        core_heads: One core token per "kv" head, or per "query" head.
        rotary: How the keys were rotated.
        scale: Factor of the scores, above 0; default 1 / sqrt(D).
        softcap: Scores become softcap * tanh(score / softcap), as in Gemma 2.
        core_bias: Added to the scores of core tokens, a number or a tensor [H].
        learned: Parameters of `CCAConfig.learned`: "temperature", "distance", "bias" [H], "probe"
            [H, D], "key_gain" [Hkv]; docs/math.md, eq. 12.
        sink_size: First tokens of every sequence that all later queries see uncompressed, rounded
            up to a multiple n of g; their groups have no core token (docs/math.md, eq. 13).
        attention_mask: [B, L], 0 for padding at the ends of a row; padded positions return 0.
        cu_seqlens: [n + 1], boundaries of the documents packed in a batch of one; each starts its
            own groups.
        position_ids: [1 or B, L], another way to tell packed documents: one starts wherever they do
            not rise by one.
        backend: "auto", "packed", "triton" or "reference".
        return_lse: Also return the log-sum-exp of the scores, [B, H, L], -inf at padding.

    Returns:
        [B, H, L, D] in the dtype of q, accumulated in float32 (float64 for float64). Differentiable
        in q, k, v, core_bias and learned, the log-sum-exp too.

    Raises:
        ValueError, TypeError: a shape, dtype or setting breaks a rule above.
        NotImplementedError: the named backend cannot take the call.

    Cost: 4 D H sum_t (j(t) + t + 1 - j(t) g) operations and memory linear in L (packed backend).
    """
    _check_types(q, k, v)
    sizes = (group_size,)
    if isinstance(group_size, (tuple, list)):
        sizes = group_size = check_sizes(group_size, k.shape[1], num_groups)
    for g in sizes:
        _validate(
            g, window_size, num_groups, pooling, core_position, core_heads, sink_size=sink_size
        )
    spec = Spec(
        group_size=group_size,
        window_size=window_size,
        scale=_scale(scale, q),
        num_groups=num_groups,
        sink_size=sink_size,
        pooling=pooling,
        core_heads=core_heads,
        softcap=_positive("softcap", softcap, "Use None for none."),
        rotary=check_rotary(rotary, core_position),
    )
    for name, x in (
        ("attention_mask", attention_mask),
        ("cu_seqlens", cu_seqlens),
        ("position_ids", position_ids),
    ):
        if x is not None:
            _check_tensor(name, x)
    inputs = Inputs(q, k, v, core_bias, learned or {})
    ragged = Ragged(attention_mask, cu_seqlens, position_ids)
    out, lse = attend(inputs, spec, ragged, backend, return_lse)
    return (out, lse) if return_lse else out


_known_settings = functools.lru_cache(maxsize=256, typed=True)(CCAConfig)


def _validate(*settings: object, **named: object) -> None:
    """Raise unless the settings make a configuration; torch.compile traces no cache."""
    (CCAConfig if torch.compiler.is_compiling() else _known_settings)(*settings, **named)


def attend(
    inputs: Inputs,
    spec: Spec,
    ragged: Ragged = EACH_ROW,
    backend: str = "auto",
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run `cca_attention` with settings that are validated already: the entry of the plug-in.

    Returns:
        out [B, H, L, D], and log-sum-exp [B, H, L], which may be None unless return_lse.

    Raises:
        ValueError, TypeError, NotImplementedError: as in `cca_attention`, about tensors and
            backend.
    """
    _check_types(*inputs[:3])
    (q, k, v), context = outside_autocast(*inputs[:3])
    _check_tensors(q, k, v)
    _check_rotary_size(spec.rotary, q.shape[3])
    learned = inputs.learned
    if learned:
        rules.check(learned, q.shape[1], k.shape[1], q.shape[3], spec.pooling)
    inputs = Inputs(q, k, v, _bias_tensor(inputs.bias, learned, q), learned)
    position_ids = ragged.position_ids
    if position_ids is not None and not torch.compiler.is_compiling():
        if not has_restarts(position_ids):
            ragged = ragged._replace(position_ids=None)
    with context:
        chosen = choose_backend(backend, q)
        if not isinstance(spec.group_size, tuple):
            return _attend(inputs, spec, ragged, chosen, return_lse)
        sizes, heads = heads_of_each(spec.group_size)
        results = [
            _attend(part, spec.replace(group_size=g), ragged, chosen, return_lse)
            for g, part in zip(sizes, split_inputs(inputs, heads))
        ]
        outs, lses = zip(*results)
        lse = gather_heads(lses, heads) if return_lse else None
        return gather_heads(outs, heads), lse


def _attend(
    inputs: Inputs, spec: Spec, ragged: Ragged, backend: str, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`attend` on checked inputs of heads of one group size, by a chosen backend."""
    q, k, v, bias, learned = inputs
    if q.numel() == 0:
        out = q + (k.sum() + v.sum())  # holds nothing, but a backward reaches all three
        return out, out.sum(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    plain = not return_lse and spec.softcap is None and bias is None
    plain = plain and all(x is None for x in ragged)
    sized = spec.for_length(q.shape[2])
    # planted: 1: full attention for one token too many
    if (
        plain
        and backend != "reference"
        and is_full_attention(q.shape[2], sized.group_size, sized.window_size, sized.sinks)
    ):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=spec.scale, enable_gqa=k.shape[1] != q.shape[1]
        )
        return out, None
    own_rule = rules.is_own_rule(spec.pooling, learned)
    if backend != "reference" and not own_rule:
        return autograd.attend(inputs, ragged, spec, backend)
    run = rules.attention
    if own_rule and torch.compiler.is_compiling():
        run = torch.compiler.disable(run)
    return run(inputs, ragged, spec, backend_module(backend, q))


def pool_core_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group_size: int = DEFAULT_GROUP_SIZE,
    pooling: str = "cca",
    core_position: str = "middle",
    core_heads: str = "kv",
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Pool every complete group of g tokens into one core token (docs/math.md, eq. 1 to 3).

    Args:
        q: Queries, [B, H, L, D]; only each group's last one is read. Other arguments as in
            `cca_attention`.

    Returns:
        core_k, core_v: [B, Hkv, L // g, D] (H instead of Hkv for core_heads="query"), in the dtype
            of k; the weights
        and sums are computed in float32 (float64 for float64). Differentiable in q, k and v.

    Raises:
        ValueError, TypeError, NotImplementedError: as in `cca_attention`.
    """
    CCAConfig(group_size, 1, None, pooling, core_position, core_heads)  # validates
    _check_types(q, k, v)
    _check_tensors(q, k, v)
    module = backend_module(backend, q)
    spec = Spec(
        group_size=group_size,
        window_size=1,
        scale=_scale(scale, q),
        pooling=pooling,
        core_heads=core_heads,
        softcap=_positive("softcap", softcap, "Use None for none."),
        rotary=check_rotary(rotary, core_position),
    )
    _check_rotary_size(spec.rotary, q.shape[3])
    num_groups = num_complete_groups(q.shape[2], group_size)
    repeats = q.shape[1] // k.shape[1]
    k, v = (
        x[:, :, : num_groups * group_size].flatten(0, 1).unflatten(1, (num_groups, group_size))
        for x in (k, v)
    )
    q_last = q[:, :, group_size - 1 :: group_size]
    q_last = q_last.reshape(k.shape[0], repeats, num_groups, q.shape[3])
    groups = Groups(q_last, k, v)
    if rules.is_own_rule(pooling, None):
        cores = rules.pool(groups, spec, {})
    else:
        cores = module.pool(groups, spec)
    return tuple(x.to(k.dtype).unflatten(0, (q.shape[0], -1)).flatten(1, 2) for x in cores)


def _check_rotary_size(rotary: Rotary | None, head_dim: int) -> None:
    """Raise unless the rotation fits the head."""
    if rotary is not None and 2 * rotary.inv_freq.numel() > head_dim:
        raise ValueError(
            f"rotary must turn at most head_dim {head_dim} dimensions, got "
            f"{2 * rotary.inv_freq.numel()}."
        )


def _scale(scale: float | None, q: Tensor) -> float:
    """The factor of the scores, by default 1 / sqrt(D)."""
    _positive("scale", scale, "Use None for 1 / sqrt(D).")
    head_dim = q.shape[3]
    # planted: oracle: default softmax scale
    scale = head_dim**-0.5 if scale is None else float(scale)
    return scale


def _positive(name: str, value: float | None, way_out: str) -> float | None:
    """Return value if it is None or a finite number above 0: others make NaN of the scores."""
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}. {way_out}")
    if not 0 < value < float("inf"):
        raise ValueError(
            f"{name} must be above 0{' and finite' if value > 0 else ''}, got {value}. {way_out}"
        )
    return value


def _bias_tensor(
    core_bias: float | Tensor | None, learned: Mapping[str, Tensor], q: Tensor
) -> Tensor | None:
    """The bias, given and learned, as [H] on q's device, or None where there is none."""
    wide = torch.promote_types(q.dtype, torch.float32)
    num_heads = q.shape[1]
    if core_bias is not None and not isinstance(core_bias, Tensor):
        if not isinstance(core_bias, (int, float)):
            raise TypeError(f"core_bias must be a number or a tensor [H], got {core_bias!r}.")
        if not abs(core_bias) < float("inf"):
            raise ValueError(f"core_bias must be finite, got {core_bias}. Use 0.0 for none.")
        if core_bias == 0:
            core_bias = None
        else:
            core_bias = torch.full((num_heads,), float(core_bias), dtype=wide, device=q.device)
    elif core_bias is not None and core_bias.shape != (num_heads,):
        raise ValueError(
            f"core_bias must be a number or have shape [H] = [{num_heads}], got "
            f"{list(core_bias.shape)}."
        )
    if "bias" in learned:
        return learned["bias"] if core_bias is None else core_bias + learned["bias"]
    if core_bias is None and "key_gain" in learned:
        # Groups of one token are then no plain attention either.
        return torch.zeros(num_heads, dtype=wide, device=q.device)
    return core_bias


def _check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are tensors of four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must be [B, heads, L, D], got {list(x.shape)}.")


def _check_tensor(name: str, x: object) -> None:
    """Raise unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are self-attention inputs of one batch."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16, float16 or float64, got {x.dtype}.")
    if k.shape != v.shape:
        raise ValueError(f"v must have the shape of k, {list(k.shape)}, got {list(v.shape)}.")
    if k.dtype != q.dtype or v.dtype != q.dtype or k.device != q.device or v.device != q.device:
        raise TypeError(
            f"q, k and v must share one dtype and device, got {q.dtype}, {k.dtype}, {v.dtype} on "
            f"{q.device}, {k.device}, {v.device}. Cast them first."
        )
    if (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]):
        raise ValueError(
            f"k must match q in batch, length and head size: q is {list(q.shape)}, k {list(k.shape)}. "
            "For new tokens on earlier ones use CompactKVCache."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the KV heads must divide the query heads, got {k.shape[1]} and {q.shape[1]}."
        )
    if q.shape[3] % 2 or not 2 <= q.shape[3] <= 512:
        raise ValueError(f"head_dim must be even and at most 512, got {q.shape[3]}.")
