"""The reference itself, against a second writing of the method: loops over tokens, and keys that
were never rotated.

Here keys are pooled before rotation and rotated once, at absolute positions: the group's middle for
a core key.
"""

import math

import pytest
import torch

from corecontext.ops.api import cca_attention, pool_core_tokens
from corecontext.ops.rotary import Rotary

F64 = torch.float64


def rotate(x: torch.Tensor, position: int, rotary: Rotary) -> torch.Tensor:
    """One vector [D] rotated at an absolute position, pair by pair as complex numbers."""
    x, pairs = x.clone(), len(rotary.inv_freq)
    for i, frequency in enumerate(rotary.inv_freq.tolist()):
        a, b = (2 * i, 2 * i + 1) if rotary.interleaved else (i, i + pairs)
        z = complex(x[a], x[b]) * complex(
            math.cos(position * frequency), math.sin(position * frequency)
        )
        x[a], x[b] = z.real, z.imag
    return x


def oracle(
    q,
    k,
    v,
    *,
    group_size,
    window_size,
    core_position="middle",
    rotary,
    softcap=None,
):
    """CCA of un-rotated q [H, L, D] and k, v [Hkv, L, D]: out, lse, core_k, core_v of each query
    head."""
    heads, length, dim = q.shape
    repeats = heads // k.shape[0]
    cap = (lambda x: x) if softcap is None else (lambda x: softcap * math.tanh(x / softcap))
    q_rot = [[rotate(q[h, t], t, rotary) for t in range(length)] for h in range(heads)]
    k_rot = [[rotate(k[h, t], t, rotary) for t in range(length)] for h in range(k.shape[0])]

    def score(h, t, key):
        return cap(float(q_rot[h][t] @ key) / math.sqrt(dim))

    def weights(h, c):
        """Pooling weights of query head h in group c, from the group's last query."""
        tokens = range(c * group_size, (c + 1) * group_size)
        e = [math.exp(score(h, tokens[-1], k_rot[h // repeats][t])) for t in tokens]
        return [x / sum(e) for x in e]

    def core(h, c):
        """Core key and value that query head h sees for group c."""
        n, tokens, middle = (
            h // repeats,
            range(c * group_size, (c + 1) * group_size),
            c * group_size + group_size // 2,
        )
        at_middle = [
            rotate(k[n, t], middle, rotary) if core_position == "middle" else k_rot[n][t]
            for t in tokens
        ]
        phi = [
            sum(w) / repeats for w in zip(*(weights(n * repeats + i, c) for i in range(repeats)))
        ]
        if core_position == "middle":
            key = rotate(sum(w * k[n, t] for w, t in zip(phi, tokens)), middle, rotary)
        else:
            key = sum(w * x for w, x in zip(phi, at_middle))
        return key, sum(w * v[n, t] for w, t in zip(phi, tokens))

    cores = [[core(h, c) for c in range(length // group_size)] for h in range(heads)]
    out, lse = torch.zeros(heads, length, dim, dtype=F64), torch.zeros(heads, length, dtype=F64)
    for h in range(heads):
        for t in range(length):
            seen = [
                c
                for c in range(length // group_size)
                if (c + 1) * group_size - 1 <= t - window_size
            ]
            terms = [(score(h, t, cores[h][c][0]), cores[h][c][1]) for c in seen]
            terms += [
                (score(h, t, k_rot[h // repeats][i]), v[h // repeats, i])
                for i in range(len(seen) * group_size, t + 1)
            ]
            total = sum(math.exp(s) for s, _ in terms)
            out[h, t] = sum(math.exp(s) / total * value for s, value in terms)
            lse[h, t] = math.log(total)
    core_k, core_v = (
        torch.stack(
            [
                torch.stack([x[i] for x in row]) if row else torch.zeros(0, dim, dtype=F64)
                for row in cores
            ]
        )
        for i in (0, 1)
    )
    return out, lse, core_k, core_v, q_rot, k_rot


FREQUENCIES = torch.tensor([1.0, 0.3, 0.1, 0.02])
HALF, INTERLEAVED = Rotary(FREQUENCIES), Rotary(FREQUENCIES, interleaved=True)
PARTIAL, PARTIAL_INTERLEAVED = Rotary(FREQUENCIES[:2]), Rotary(FREQUENCIES[:3], interleaved=True)
CASES = [
    {"rotary": HALF},
    {"rotary": INTERLEAVED},
    {"rotary": PARTIAL},
    {"rotary": PARTIAL_INTERLEAVED},
    {"rotary": HALF, "core_position": "token"},
    {"rotary": PARTIAL, "softcap": 1.5},
]


@pytest.mark.parametrize("backend", ["reference", "packed"])
@pytest.mark.parametrize(
    "length, group_size, window_size", [(13, 3, 2), (13, 4, 3), (11, 2, 5), (9, 1, 4), (4, 5, 6)]
)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_operator_equals_the_second_writing(device, backend, length, group_size, window_size, case):
    settings, dim = dict(CASES[case]), 8
    generator = torch.Generator().manual_seed(case)
    q = torch.randn(4, length, dim, dtype=F64, generator=generator)
    k, v = (torch.randn(2, length, dim, dtype=F64, generator=generator) for _ in "kv")
    out, lse, core_k, core_v, q_rot, k_rot = oracle(
        q, k, v, group_size=group_size, window_size=window_size, **settings
    )
    rotated = [
        torch.stack([torch.stack(row) for row in x])[None].to(device) for x in (q_rot, k_rot)
    ]
    v = v[None].to(device)
    got, got_lse = cca_attention(
        *rotated,
        v,
        group_size=group_size,
        window_size=window_size,
        backend=backend,
        return_lse=True,
        **settings,
    )
    torch.testing.assert_close(got[0].cpu(), out, rtol=0, atol=1e-12)
    torch.testing.assert_close(got_lse[0].cpu(), lse, rtol=0, atol=1e-12)
    pooled = pool_core_tokens(*rotated, v, group_size=group_size, backend=backend, **settings)
    for mine, theirs in zip(pooled, (core_k, core_v)):
        mine = mine[0].cpu().repeat_interleave(4 // mine.shape[1], 0)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
