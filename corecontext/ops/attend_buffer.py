"""Attend from one new token per row to a buffer of raw and core tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from corecontext.ops.torch_attention import scaled_attention


def attend_buffer(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    see: Tensor,
    num_raw: int,
    *,
    scale: float,
    softcap: float | None = None,
    mass: Tensor | None = None,
) -> Tensor:
    """Attend in one softmax over the entries that each row sees (docs/math.md, eq. 5 for a single
    query).

    Args:
        q: [B, H, 1, D].
        keys, values: [B, Hkv, S, D]: num_raw raw tokens in any order, then core tokens in any.
        see: [B, 1, S], True where the query sees the entry.
        mass: Added to the scores of core tokens, [B, Hkv, S - num_raw]; not rounded to the dtype of
            q.

    Returns:
        [B, H, 1, D].
    """
    # The r query heads of a KV head are rows of one product.
    grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[3])
    mask = see[:, None]  # [B, 1, 1, S]
    wide = torch.promote_types(q.dtype, torch.float32)
    if mass is not None:
        # PyTorch wants a mask in the dtype of the queries, and 16 bits would round the masses.
        grouped, keys, values = (x.to(wide) for x in (grouped, keys, values))
        # mutant mass: not that of the entry, decoding
        # mutant mass: raw tokens have one, decoding
        # mutant decoding: masses rounded to 16 bits
        of_entries = F.pad(mass.to(wide), (num_raw, 0))[:, :, None]  # [B, Hkv, 1, S]
        mask = torch.where(mask, of_entries, -torch.inf)
    if softcap is None:
        out = scaled_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return out.to(q.dtype).reshape(q.shape)
    scores = softcap * torch.tanh((grouped @ keys.mT).to(wide) * scale / softcap)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    else:
        scores = scores + mask
    out = scores.softmax(-1).to(values.dtype) @ values
    return out.to(q.dtype).reshape(q.shape)
