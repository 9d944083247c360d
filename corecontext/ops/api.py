"""The public operators: signatures, validation and the choice of a backend; no arithmetic."""

import contextlib
import functools
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType

import torch
from torch import Tensor

from corecontext.config import BACKENDS, PAPER_RULE, CCAConfig, check_choice, refuses_removed
from corecontext.ops import autograd, checks, packed
from corecontext.ops.batch import check_positions, complete_groups, has_restarts
from corecontext.ops.fetch.choice import Choice
from corecontext.ops.fetch.crossover import is_full_faster
from corecontext.ops.fetch.index import Index
from corecontext.ops.head_split import check_sizes, gather_heads, heads_of_each, split_inputs
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import EACH_ROW, Inputs, Ragged, Spec, Tokens, check_rotary
from corecontext.ops.torch_attention import scaled_attention

AUTO_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes in which "auto" takes Triton; in float32 `packed` (cuBLAS) is faster."""
TRITON_DTYPES = (*AUTO_DTYPES, torch.float32)
"""Dtypes that Triton takes."""
# Found out at import: torch.compile cannot trace find_spec.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def choose_backend(
    backend: str, q: Tensor, triton_dtypes: Sequence[torch.dtype] = AUTO_DTYPES
) -> str:
    """Return the name of the backend that takes this call; an explicit request never falls back.

    Args:
        triton_dtypes: Dtypes in which "auto" may take Triton.
    """
    check_choice("backend", backend, BACKENDS)
    if backend == "auto":
        suits_triton = q.device.type == "cuda" and q.dtype in triton_dtypes
        if suits_triton and _unsupported_reason("triton", q) is None:
            return "triton"
        return "packed" if packed.unsupported_reason(q) is None else "reference"
    reason = _unsupported_reason(backend, q)
    if reason is not None:
        alternative = "packed" if backend == "triton" else "reference"
        raise NotImplementedError(
            f"backend {backend!r} cannot run this call: {reason}. Use backend={alternative!r}."
        )
    return backend


def _unsupported_reason(backend: str, q: Tensor) -> str | None:
    """Return why a backend cannot take the call, or None."""
    if backend == "triton" and not _HAS_TRITON:
        return "the package triton is not installed"
    return autograd.module_of(backend).unsupported_reason(q)


def backend_module(backend: str, q: Tensor) -> ModuleType:
    """Return the module with `pool` and `attend` that takes this call."""
    return autograd.module_of(choose_backend(backend, q))


def outside_autocast(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], AbstractContextManager]:
    """Return the inputs in the dtype that autocast gives attention, and a context without autocast.

    Inside, pooling weights and merges stay in float32; autocast would compute their products in
    half precision.
    """
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return (q, k, v), contextlib.nullcontext()
    dtype = torch.get_autocast_dtype(device)
    cast = tuple(x.to(dtype) if x.dtype != torch.float64 else x for x in (q, k, v))
    return cast, torch.autocast(device, enabled=False)


@refuses_removed
def cca_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group_size: int | Sequence[int] = PAPER_RULE["group_size"],
    window_size: int = PAPER_RULE["window_size"],
    num_groups: int | None = None,
    core_position: str = "middle",
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    core_mass: bool = PAPER_RULE["core_mass"],
    fetch_groups: int = 0,
    fetch_index: str | Index = PAPER_RULE["fetch_index"],
    fetch_share: int | None = None,
    choice: Choice | None = None,
    sink_size: int = PAPER_RULE["sink_size"],
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
        core_position: "middle" rotates core keys to their group's middle position and needs
            `rotary`; "token" pools the keys as they are.
        rotary: How the keys were rotated.
        scale: Factor of the scores, above 0; default 1 / sqrt(D).
        softcap: Scores become softcap * tanh(score / softcap), as in Gemma 2.
        core_mass: Add the entropy of its pooling weights, its mass, to each core token's score
            (docs/math.md, eq. 14). The paper's equation has none; the default of `CCAConfig` does.
        fetch_groups: Groups whose raw tokens each query sees instead of their core tokens (k): the
            best by the index, chosen for each KV head. 0 is CCA; where all groups that are seen are
            fetched, this is full attention (docs/fetch.md).
        fetch_index: The index that chooses, as `CCAConfig.fetch_index`: "mean", "bits:2"; or an
            `Index` with weights of its own.
        fetch_share: Neighbouring queries, aligned to absolute positions, that share one choice.
            Above 1 the choice looks up to fetch_share - 1 tokens ahead: for prompts only, never
            where perplexity is measured or a model is trained. By default each query chooses by
            itself, and full attention, which is exact, takes the call where it takes less time and
            backend is "auto" (docs/fetch.md); with 1 each query chooses at any length.
        choice: Groups that queries fetch, chosen by anybody, in place of an index:
            `ops.fetch.choice.Choice(groups, share)`. groups is [B Hkv, C, k] in int32 on the device
            of q: for each row, KV head and share the numbers of at most k groups, rising, then -1
            up to k. Group 0 has the first g tokens after the n kept raw. A share is `share`
            neighbouring queries, so C = ceil(L / share); its last query must see the groups, others
            drop those that they do not see. k and share replace fetch_groups and fetch_share. It
            has no gradient. Not for ragged batches, with a g for each head, or in torch.compile.
        sink_size: First tokens of every sequence that all later queries see uncompressed, rounded
            up to a multiple n of g; their groups have no core token (docs/math.md, eq. 13). 0, the
            paper's equation, keeps none; the default of `CCAConfig` does.
        attention_mask: [B, L], 0 for padding at the ends of a row; padded positions return 0. This
            tensor, `cu_seqlens` and `position_ids` are read once for all layers, again after a
            change that PyTorch sees. Give a new tensor after writing through numpy, `.data` or
            shared memory: such a change is not seen.
        cu_seqlens: [n + 1], boundaries of the documents packed in a batch of one; each starts its
            own groups.
        position_ids: [1 or B, L], another way to tell packed documents: one starts wherever they do
            not rise by one.
        backend: "auto", "packed", "triton" or "reference".
        return_lse: Also return the log-sum-exp of the scores, [B, H, L], -inf at padding.

    Returns:
        [B, H, L, D] in the dtype of q, accumulated in float32 (float64 for float64). Differentiable
        in q, k and v, the log-sum-exp too.

    Raises:
        ValueError, TypeError: a shape, dtype or setting breaks a rule above.
        NotImplementedError: the named backend cannot take the call.

    Cost (packed backend): memory linear in L, and 4 D H sum_t (j(t) + t + 1 - j(t) g) operations;
    query t sees j(t) core tokens, and all tokens behind their groups.
    """
    checks.check_types(q, k, v)
    sizes = (group_size,)
    if isinstance(group_size, (tuple, list)):
        sizes = group_size = check_sizes(group_size, k.shape[1], num_groups)
    if choice is not None:
        checks.check_choice_settings(choice, fetch_groups, fetch_share)
        fetch_groups = choice.groups.shape[2]
        fetch_share = choice.share
    has_own_index = isinstance(fetch_index, Index)
    # torch.compile traces no cache.
    validate = CCAConfig if torch.compiler.is_compiling() else _known_settings
    for g in sizes:
        validate(
            *(g, window_size, num_groups, core_position),
            core_mass=core_mass,
            sink_size=sink_size,
            fetch_groups=fetch_groups,
            fetch_index=PAPER_RULE["fetch_index"] if has_own_index else fetch_index,
            fetch_share=1 if fetch_share is None else fetch_share,
        )
    spec = Spec(
        group_size=group_size,
        window_size=window_size,
        scale=checks.scale_of(scale, q),
        num_groups=num_groups,
        sink_size=sink_size,
        softcap=checks.positive("softcap", softcap, "Use None for none."),
        core_mass=core_mass,
        fetch_groups=fetch_groups,
        fetch_index=fetch_index,
        fetch_share=fetch_share or 1,
        rotary=check_rotary(rotary, core_position),
    )
    ragged = Ragged(attention_mask, cu_seqlens, position_ids)
    for name, x in zip(ragged._fields, ragged):
        if x is not None:
            checks.check_tensor(name, x)
    inputs = Inputs(q, k, v, choice)
    fetches = fetch_share == 1  # given, not by default
    out, lse = attend(inputs, spec, ragged, backend, return_lse, fetches)
    return (out, lse) if return_lse else out


_known_settings = functools.lru_cache(maxsize=256, typed=True)(CCAConfig)


def attend(
    inputs: Inputs,
    spec: Spec,
    ragged: Ragged = EACH_ROW,
    backend: str = "auto",
    return_lse: bool = False,
    fetches: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Run `cca_attention` with validated settings: the entry of the plug-in for transformers.

    Args:
        fetches: Whether queries that choose by themselves fetch even where full attention takes
            less time.

    Returns:
        out [B, H, L, D], and log-sum-exp [B, H, L], which may be None unless return_lse.

    Raises:
        ValueError, TypeError, NotImplementedError: as in `cca_attention`, about tensors and
            backend.
    """
    checks.check_types(*inputs[:3])
    (q, k, v), context = outside_autocast(*inputs[:3])
    checks.check_tensors(q, k, v)
    checks.check_rotary_size(spec.rotary, q.shape[3])
    inputs = inputs._replace(q=q, k=k, v=v)
    if ragged.position_ids is not None:
        # mutant 5: position_ids of another length are taken
        check_positions(ragged.position_ids, q.shape[0], q.shape[2])
        if not torch.compiler.is_compiling() and not has_restarts(ragged.position_ids):
            ragged = ragged._replace(position_ids=None)
    if inputs.choice is not None:
        choice = checks.check_choice(inputs.choice, k, spec, ragged)
        inputs = inputs._replace(choice=choice)
    with context:
        chosen = choose_backend(backend, q)
        # Full attention may take calls in which choices are shared, or each by itself by default.
        # mutant fetch: full attention where each query must choose
        may_be_full = spec.fetch_groups > 0 and (spec.fetch_share > 1 or not fetches)
        plain = chosen == "triton" and _is_plain(inputs, spec, ragged, return_lse)
        if may_be_full and plain and backend == "auto":
            has_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            if is_full_faster(spec, q.shape[2], has_gradients):
                # All groups are fetched: PyTorch's full attention.
                spec = spec.replace(fetch_groups=q.shape[2])
        if not isinstance(spec.group_size, tuple):
            return _attend(inputs, spec, ragged, chosen, return_lse)
        sizes, heads = heads_of_each(spec.group_size)
        results = [
            _attend(inputs_of_g, spec.replace(group_size=g), ragged, chosen, return_lse)
            for g, inputs_of_g in zip(sizes, split_inputs(inputs, heads))
        ]
        outs, lses = zip(*results)
        lse = gather_heads(lses, heads) if return_lse else None
        return gather_heads(outs, heads), lse


def _is_plain(inputs: Inputs, spec: Spec, ragged: Ragged, return_lse: bool) -> bool:
    """Whether PyTorch's attention could take the call if all tokens were seen raw."""
    plain = not return_lse and spec.softcap is None and inputs.choice is None
    return plain and all(x is None for x in ragged)


def _attend(
    inputs: Inputs, spec: Spec, ragged: Ragged, backend: str, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Run `attend` on checked inputs of heads of one group size, by a chosen backend."""
    q, k, v = inputs[:3]
    if q.numel() == 0:
        out = q + (k.sum() + v.sum())  # empty, but a backward reaches all three
        return out, out.sum(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    # PyTorch's attention, where CCA is full causal attention.
    length = q.shape[2]
    if backend != "reference" and _is_plain(inputs, spec, ragged, return_lse):
        sized = spec.for_length(length)
        # mutant 1: full attention for one token too many
        if sized.is_full(length):
            # mutant 1: short rows forget the scale
            out = scaled_attention(
                q, k, v, is_causal=True, scale=spec.scale, enable_gqa=k.shape[1] != q.shape[1]
            )
            return out, None
    return autograd.attend(inputs, ragged, spec, backend)


@refuses_removed
def pool_core_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group_size: int = PAPER_RULE["group_size"],
    core_position: str = "middle",
    rotary: Rotary | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Pool every complete group of g tokens into one core token (docs/math.md, eq. 1 to 3), from
    the first token on: there are no sinks here.

    Args:
        q: Queries, [B, H, L, D]; only each group's last one is read. Other arguments as in
            `cca_attention`.

    Returns:
        core_k, core_v: [B, Hkv, L // g, D], in the dtype of k; the weights and sums are computed in
            float32 (float64 for float64). Differentiable in q, k and v.

    Raises:
        ValueError, TypeError, NotImplementedError: as in `cca_attention`.
    """
    CCAConfig.paper(group_size, 1, core_position=core_position)  # validates
    checks.check_types(q, k, v)
    checks.check_tensors(q, k, v)
    module = backend_module(backend, q)
    spec = Spec(
        group_size=group_size,
        window_size=1,
        scale=checks.scale_of(scale, q),
        softcap=checks.positive("softcap", softcap, "Use None for none."),
        rotary=check_rotary(rotary, core_position),
    )
    checks.check_rotary_size(spec.rotary, q.shape[3])
    rows, heads, length, dim = q.shape
    q = q.reshape(rows * k.shape[1], heads // k.shape[1], length, dim)
    k, v = (x.flatten(0, 1) for x in (k, v))
    groups = complete_groups(Tokens(q, k, v), group_size)
    cores = module.pool(groups, spec)
    return tuple(x.to(k.dtype).unflatten(0, (rows, -1)).flatten(1, 2) for x in cores)
