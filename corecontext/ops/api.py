"""The public operators: signatures, validation and the choice of a backend; no arithmetic."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.config import BACKENDS, CCAConfig, check_choice
from corecontext.ops import autograd, packed, reference, rules
from corecontext.ops.batch import SegmentView, find_segments, has_restarts
from corecontext.ops.head_split import check_sizes, deal, deal_learned, heads_of_each, put_back
from corecontext.ops.rotary import Rotary
from corecontext.visibility import group_size_for, is_full_attention, num_sinks

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
    group_size: int | Sequence[int] = 16,
    window_size: int = 1024,
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
    if isinstance(group_size, (tuple, list)):
        return _attend_by_heads(
            q,
            k,
            v,
            tuple(group_size),
            core_bias,
            learned or {},
            return_lse,
            {
                "window_size": window_size,
                "num_groups": num_groups,
                "pooling": pooling,
                "core_position": core_position,
                "core_heads": core_heads,
                "rotary": rotary,
                "scale": scale,
                "softcap": softcap,
                "sink_size": sink_size,
                "attention_mask": attention_mask,
                "cu_seqlens": cu_seqlens,
                "position_ids": position_ids,
                "backend": backend,
            },
        )
    _validate(
        group_size, window_size, num_groups, pooling, core_position, core_heads, sink_size=sink_size
    )
    _check_types(q, k, v)
    (q, k, v), context = outside_autocast(q, k, v)
    with context:
        out, lse = _attend(
            q,
            k,
            v,
            group_size,
            window_size,
            num_groups,
            pooling,
            core_position,
            core_heads,
            rotary,
            scale,
            softcap,
            core_bias,
            learned or {},
            sink_size,
            attention_mask,
            cu_seqlens,
            position_ids,
            backend,
            return_lse,
        )
    return (out, lse) if return_lse else out


def _attend_by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: tuple[int, ...],
    core_bias: float | Tensor | None,
    learned: Mapping[str, Tensor],
    return_lse: bool,
    options: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """`cca_attention` for the KV heads of each group size by themselves."""
    _check_types(q, k, v)
    (q, k, v), context = outside_autocast(q, k, v)
    _check_tensors(q, k, v)
    kv_heads = len(check_sizes(sizes, k.shape[1], options["num_groups"]))
    every, parts = heads_of_each(sizes)
    biases = (
        deal(core_bias, parts, kv_heads, 0)
        if isinstance(core_bias, Tensor) and core_bias.dim()
        else [core_bias] * len(parts)
    )
    found = []
    for g, bias, own, *tensors in zip(
        every,
        biases,
        deal_learned(learned, parts, kv_heads),
        *(deal(x, parts, kv_heads) for x in (q, k, v)),
    ):
        with context:
            part = cca_attention(
                *tensors,
                group_size=g,
                core_bias=bias,
                learned=own,
                return_lse=return_lse,
                **options,
            )
        found.append(part if isinstance(part, tuple) else (part,))
    out, *lse = (put_back(dealt, parts) for dealt in zip(*found))
    return (out, lse[0]) if return_lse else out


_known_settings = functools.lru_cache(maxsize=256, typed=True)(CCAConfig)


def _validate(*settings: object, **named: object) -> None:
    """Raise unless the settings make a configuration; torch.compile traces no cache."""
    (CCAConfig if torch.compiler.is_compiling() else _known_settings)(*settings, **named)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group_size: int,
    window_size: int,
    num_groups: int | None,
    pooling: str,
    core_position: str,
    core_heads: str,
    rotary: Rotary | None,
    scale: float | None,
    softcap: float | None,
    core_bias: float | Tensor | None,
    learned: Mapping[str, Tensor],
    sink_size: int,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    backend: str,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """`cca_attention` on inputs of one dtype; the log-sum-exp may be None where it is not asked
    for."""
    _check_tensors(q, k, v)
    chosen = choose_backend(backend, q)
    batch_size, num_heads, seq_len, head_dim = q.shape
    rotary = _check_rotary(rotary, core_position, head_dim)
    _check_positive("softcap", softcap, "Use None for none.")
    _check_positive("scale", scale, "Use None for 1 / sqrt(D).")
    # planted: oracle: default softmax scale
    scale = head_dim**-0.5 if scale is None else float(scale)
    bias = _bias_tensor(core_bias, q)
    for name, x in (
        ("attention_mask", attention_mask),
        ("cu_seqlens", cu_seqlens),
        ("position_ids", position_ids),
    ):
        if x is not None:
            _check_tensor(name, x)
    if learned:
        rules.check(learned, num_heads, k.shape[1], head_dim, pooling)
        if "bias" in learned:
            bias = learned["bias"] if bias is None else bias + learned["bias"]
        elif (
            bias is None and "key_gain" in learned
        ):  # groups of one token are then no plain attention either
            bias = torch.zeros(
                num_heads, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device
            )
    if (
        position_ids is not None
        and not torch.compiler.is_compiling()
        and not has_restarts(position_ids)
    ):
        position_ids = None
    ragged = attention_mask is not None or cu_seqlens is not None or position_ids is not None
    if q.numel() == 0:
        out = q + (k.sum() + v.sum())  # holds nothing, but a backward reaches all three
        return out, out.sum(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    size = group_size_for(seq_len, window_size, num_groups) if num_groups else group_size
    plain = not ragged and not return_lse and softcap is None and bias is None
    # planted: 1: full attention for one token too many
    if (
        plain
        and chosen != "reference"
        and is_full_attention(seq_len, size, window_size, num_sinks(sink_size, size))
    ):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != num_heads
        ), None
    if rules.is_own_rule(pooling, learned):
        options = {
            "scale": scale,
            "softcap": softcap,
            "pooling": pooling,
            "core_heads": core_heads,
            "rotary": rotary,
        }
        run = (
            torch.compiler.disable(rules.attention)
            if torch.compiler.is_compiling()
            else rules.attention
        )
        return run(
            backend_module(chosen, q),
            q,
            k,
            v,
            bias,
            learned,
            attention_mask,
            cu_seqlens,
            position_ids,
            (group_size, window_size, num_groups or 0, sink_size),
            options,
        )
    if chosen != "reference":
        settings = autograd.Settings(
            group_size,
            window_size,
            num_groups or 0,
            sink_size,
            scale,
            softcap or 0.0,
            pooling,
            core_heads,
            rotary is not None and rotary.interleaved,
            chosen,
        )
        out, lse = autograd.cca_attention(
            q,
            k,
            v,
            bias,
            None if rotary is None else rotary.inv_freq,
            attention_mask,
            cu_seqlens,
            position_ids,
            settings,
        )
    else:
        out = q.new_zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        lse = out.new_full(q.shape[:-1], -torch.inf)
        for segment in find_segments(batch_size, seq_len, attention_mask, cu_seqlens, position_ids):
            one = SegmentView(
                segment, q, k, v, bias, group_size, window_size, num_groups or 0, sink_size
            )
            core_k, core_v = reference.pool(
                *one.groups(),
                scale=scale,
                pooling=pooling,
                core_heads=core_heads,
                rotary=rotary,
                softcap=softcap,
            )
            part_out, part_lse = reference.attend(
                one.q,
                one.k,
                one.v,
                core_k,
                core_v,
                **one.sizes,
                scale=scale,
                softcap=softcap,
                core_bias=one.core_bias,
            )
            one.put(out, part_out)
            one.put(lse, part_lse)
        out = out.to(q.dtype)
    return out, lse


def pool_core_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group_size: int = 16,
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
    _check_tensors(q, k, v)
    module = backend_module(backend, q)
    rotary = _check_rotary(rotary, core_position, q.shape[3])
    _check_positive("softcap", softcap, "Use None for none.")
    _check_positive("scale", scale, "Use None for 1 / sqrt(D).")
    num_groups, head_dim, repeats = q.shape[2] // group_size, q.shape[3], q.shape[1] // k.shape[1]
    k, v = (
        x[:, :, : num_groups * group_size].flatten(0, 1).unflatten(1, (num_groups, group_size))
        for x in (k, v)
    )
    q_last = q[:, :, group_size - 1 :: group_size].reshape(
        k.shape[0], repeats, num_groups, head_dim
    )
    options = {
        "scale": head_dim**-0.5 if scale is None else float(scale),
        "pooling": pooling,
        "core_heads": core_heads,
        "rotary": rotary,
        "softcap": softcap,
    }
    own = rules.is_own_rule(pooling, None)
    cores = rules.pool(q_last, k, v, {}, **options) if own else module.pool(q_last, k, v, **options)
    return tuple(x.to(k.dtype).unflatten(0, (q.shape[0], -1)).flatten(1, 2) for x in cores)


def _check_rotary(rotary: Rotary | None, core_position: str, head_dim: int) -> Rotary | None:
    """The rotation that core keys need, or None."""
    if core_position == "token":
        return None
    if rotary is None:
        raise ValueError(
            "rotary must be given for core_position='middle', got None. "
            "Pass rotary=Rotary.from_theta(theta, head_dim), or core_position='token'."
        )
    if not isinstance(rotary, Rotary):
        raise TypeError(
            f"rotary must be a corecontext.ops.rotary.Rotary, got {type(rotary).__name__}. "
            "Pass Rotary.from_theta(theta, head_dim)."
        )
    if 2 * rotary.inv_freq.numel() > head_dim:
        raise ValueError(
            f"rotary must turn at most head_dim {head_dim} dimensions, got {2 * rotary.inv_freq.numel()}."
        )
    return rotary


def _check_positive(name: str, value: float | None, way_out: str) -> None:
    """Raise unless value is None or a finite number above 0: others make NaN of the scores."""
    if value is None:
        return
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {value!r}. {way_out}")
    if not 0 < value < float("inf"):
        raise ValueError(
            f"{name} must be above 0{' and finite' if value > 0 else ''}, got {value}. {way_out}"
        )


def _bias_tensor(core_bias: float | Tensor | None, q: Tensor) -> Tensor | None:
    """The bias as [H] on q's device, or None where there is none."""
    if core_bias is None or (not isinstance(core_bias, Tensor) and core_bias == 0):
        return None
    if not isinstance(core_bias, Tensor):
        if not isinstance(core_bias, (int, float)):
            raise TypeError(f"core_bias must be a number or a tensor [H], got {core_bias!r}.")
        if not abs(core_bias) < float("inf"):
            raise ValueError(f"core_bias must be finite, got {core_bias}. Use 0.0 for none.")
        return torch.full(
            (q.shape[1],),
            float(core_bias),
            dtype=torch.promote_types(q.dtype, torch.float32),
            device=q.device,
        )
    if core_bias.shape != (q.shape[1],):
        raise ValueError(
            f"core_bias must be a number or have shape [H] = [{q.shape[1]}], got {list(core_bias.shape)}."
        )
    return core_bias


def _check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are tensors at all."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)


def _check_tensor(name: str, x: object) -> None:
    """Raise unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are self-attention inputs of one batch."""
    _check_types(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must be [B, heads, L, D], got {list(x.shape)}.")
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
