"""Merge attention to the first tokens of a sequence, which stay raw, with a backend's attention to
the tokens after them.

The tokens after the first n, n a multiple of g, are by themselves a sequence with the same groups
(docs/math.md, eq. 13). So a backend attends to them as if there were no sinks; the first tokens are
one more part of the softmax, over disjoint keys, and every part's backward gets the merged result
(eq. 8 and 9). The reference does not use this file: it has the rule in its mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from corecontext.ops import partial
from corecontext.ops.merge import merge_into
from corecontext.ops.spec import Cores, Spec, Tokens, Upstream

Attend = Callable[[Tokens, Cores, Spec, Tensor | None], tuple[Tensor, Tensor]]
AttendBackward = Callable[[Upstream, Tokens, Cores, Spec, Tensor | None], tuple]


def attend(
    backend_attend: Attend, tokens: Tokens, cores: Cores, spec: Spec, mass: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend from any queries of a sequence whose first n = `spec.sinks` tokens stay raw.

    Args:
        backend_attend: A backend's attention without first tokens kept raw.
        cores: Core tokens of the groups after the first tokens.

    Returns:
        out [N, r, T, D] in the dtype that the backend gives, log-sum-exp [N, r, T].
    """
    sink_k, sink_v, rest = _split(tokens, spec.sinks)
    q = tokens.q
    q_start = tokens.q_start
    num_sink_queries = q.shape[2] - rest.q.shape[2]
    scoring = partial.Scoring(spec.scale, spec.softcap)
    results = []
    # Queries of first tokens: causal attention among first tokens.
    if num_sink_queries:
        seen = q_start + num_sink_queries
        masked = scoring._replace(is_causal=True)
        if q_start:
            position = torch.arange(seen, device=q.device)
            # mutant sinks: the future among them is seen
            mask = partial.as_mask(position <= position[q_start:, None], q)
            masked = scoring._replace(mask=mask)
        seen_k, seen_v = (x[:, None, :seen] for x in (sink_k, sink_v))
        results.append(partial.forward(q[:, :, :num_sink_queries], seen_k, seen_v, masked))
    # Later queries: the backend's attention, merged with attention to all first tokens.
    if rest.q.shape[2]:
        out, lse = backend_attend(rest, cores, spec.replace(sink_size=0), mass)
        to_sinks = partial.forward(rest.q, sink_k[:, None], sink_v[:, None], scoring)
        # mutant sinks: later queries do not see them
        merge_into(out, lse, to_sinks)
        results.append((out, lse))
    if len(results) == 1:
        return results[0]
    (first_out, first_lse), (out, lse) = results
    return torch.cat([first_out.to(out.dtype), out], 2), torch.cat([first_lse, lse], 2)


def attend_backward(
    backend_backward: AttendBackward,
    upstream: Upstream,
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, core_k, core_v and masses of a whole sequence whose first n
    tokens stay raw.

    Args:
        backend_backward: A backend's backward without first tokens kept raw.
    """
    n = spec.sinks
    q = tokens.q
    wide = upstream.lse.dtype
    sink_k, sink_v, rest = _split(tokens, n)

    def to_sinks(rows: slice, is_causal: bool) -> list[Tensor]:
        # mutant sinks: the gradient of the log-sum-exp dropped
        results = upstream.rows(rows)
        results = results._replace(out=results.out.to(q.dtype))
        dq, dk, dv = partial.backward(
            results,
            q[:, :, rows],
            sink_k[:, None],
            sink_v[:, None],
            partial.Scoring(spec.scale, spec.softcap, is_causal),
        )
        return [dq.to(wide), dk[:, 0].to(wide), dv[:, 0].to(wide)]

    among_dq, among_dk, among_dv = to_sinks(slice(0, n), is_causal=True)
    later_dq, later_dk, later_dv = to_sinks(slice(n, None), is_causal=False)
    dq, dk, dv, *core_grads = backend_backward(
        upstream.rows(slice(n, None)), rest, cores, spec.replace(sink_size=0), mass
    )
    # mutant sinks: their gradient from later queries dropped
    sink_dk = among_dk + later_dk
    return (
        torch.cat((among_dq, dq + later_dq), 2),
        torch.cat((sink_dk, dk), 1),
        torch.cat((among_dv + later_dv, dv), 1),
        *core_grads,
    )


def _split(tokens: Tokens, n: int) -> tuple[Tensor, Tensor, Tokens]:
    """Return the keys and the values of the first n tokens, and the tokens after them, at positions
    counted from n."""
    q, k, v, q_start, k_start, sink_k, sink_v = tokens
    if sink_k is None:
        sink_k, sink_v = k[:, :n], v[:, :n]
        k = k[:, n:]
        v = v[:, n:]
        k_start = n
    # mutant sinks: the start of a chunk forgotten
    num_sink_queries = max(0, min(n - q_start, q.shape[2]))
    q = q[:, :, num_sink_queries:]
    return sink_k, sink_v, Tokens(q, k, v, q_start + num_sink_queries - n, k_start - n)
