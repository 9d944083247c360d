"""Check the arguments of the operators, and complete the scale."""

import torch
from torch import Tensor

from corecontext.config import check_int
from corecontext.ops.fetch.choice import Choice, num_shares
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Ragged, Spec
from corecontext.visibility import num_visible_cores

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_types(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v are tensors of four dimensions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must be [B, heads, L, D], got {list(x.shape)}.")
        if x.is_meta:
            raise ValueError(f"{name} must hold numbers, got a meta tensor. Load the weights.")


def check_tensor(name: str, x: object) -> None:
    """Raise unless x is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}.")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
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
            f"k must match q in batch, length and head size: q is {list(q.shape)}, k "
            f"{list(k.shape)}. For new tokens on earlier ones use CompactKVCache."
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the KV heads must divide the query heads, got {k.shape[1]} and {q.shape[1]}."
        )
    if q.shape[3] % 2 or not 2 <= q.shape[3] <= 512:
        raise ValueError(f"head_dim must be even and at most 512, got {q.shape[3]}.")


def check_rotary_size(rotary: Rotary | None, head_dim: int) -> None:
    """Raise unless the rotation fits the head."""
    if rotary is not None and 2 * rotary.inv_freq.numel() > head_dim:
        raise ValueError(
            f"rotary must rotate at most head_dim {head_dim} dimensions, got "
            f"{2 * rotary.inv_freq.numel()}."
        )


def positive(name: str, value: float | None, way_out: str) -> float | None:
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


def scale_of(scale: float | None, q: Tensor) -> float:
    """Return the factor of the scores, by default 1 / sqrt(D)."""
    if scale is None:
        # mutant oracle: default softmax scale
        return q.shape[3] ** -0.5
    positive("scale", scale, "Use None for 1 / sqrt(D).")
    return float(scale)


def check_choice_settings(choice: Choice, fetch_groups: int, fetch_share: int | None) -> None:
    """Raise unless a choice is one, and the settings beside it say the same."""
    if not isinstance(choice, Choice):
        raise TypeError(
            f"choice must be a Choice, got {type(choice).__name__}. Make one with "
            "corecontext.ops.fetch.choice.Choice(groups, share)."
        )
    groups, share = choice
    check_tensor("choice.groups", groups)
    check_int("choice.share", share, 1)
    if groups.dim() != 3:
        raise ValueError(
            f"choice.groups must be [B Hkv, C, k], got {list(groups.shape)}. Of [B, Hkv, C, k] use "
            "groups.flatten(0, 1)."
        )
    if groups.dtype != torch.int32:
        raise TypeError(f"choice.groups must be int32, got {groups.dtype}. Use groups.int().")
    if fetch_groups not in (0, groups.shape[2]):
        raise ValueError(
            f"fetch_groups must be the choice's {groups.shape[2]}, got {fetch_groups}. Leave it "
            "out."
        )
    if fetch_share not in (None, share):
        raise ValueError(
            f"fetch_share must be the choice's {share}, got {fetch_share}. Leave it out."
        )


def check_choice(choice: Choice, k: Tensor, spec: Spec, ragged: Ragged) -> Choice:
    """Return a choice, contiguous, if its groups are those that queries see; asks the device.

    Args:
        k: [B, Hkv, L, D].
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError("choice must be None under torch.compile. Disable it here.")
    if any(x is not None for x in ragged) or isinstance(spec.group_size, tuple):
        raise NotImplementedError(
            "choice must come with rows of one length and one group_size for all heads. Call each "
            "document, or the heads of each g, by themselves."
        )
    groups, share = choice
    length = k.shape[2]
    wanted = [k.shape[0] * k.shape[1], num_shares(0, length, share)]
    if list(groups.shape[:2]) != wanted:
        raise ValueError(
            f"choice.groups must be [B Hkv, C, k] with B Hkv = {wanted[0]} and C = ceil(L / share) "
            f"= {wanted[1]}, got {list(groups.shape)}."
        )
    if groups.device != k.device:
        raise ValueError(f"choice.groups must be on {k.device}, got {groups.device}. Move them.")
    if not groups.numel():
        return choice
    before = groups[..., :-1]
    after = groups[..., 1:]
    if bool((groups < -1).any() | ((after >= 0) & ((before < 0) | (after <= before))).any()):
        raise ValueError(
            "choice.groups must rise in each row, without equal numbers, then be -1, got others. "
            "Sort them, and put -1 last."
        )
    # Groups that the last query of each share sees; `ends` are the positions behind these queries.
    sized = spec.for_length(length)
    g = sized.group_size
    ends = [min(end, length) for end in range(share, length + share, share)]
    seen = [num_visible_cores(end - 1, g, sized.window_size) - sized.sinks // g for end in ends]
    seen = torch.tensor(seen, device=groups.device).clamp(min=0)
    unseen = groups >= seen[:, None]
    if bool(unseen.any()):
        sequence, number, place = unseen.nonzero()[0].tolist()
        raise ValueError(
            f"choice.groups must be groups that the last query of their share sees, got "
            f"{int(groups[sequence, number, place])} in share {number}, which sees "
            f"{int(seen[number])}. Take groups of the far past, and -1 where there are fewer."
        )
    return choice._replace(groups=groups.contiguous())
