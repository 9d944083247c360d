"""Attend by the best kernels for the device: Hopper's own where they can, else anywhere.py's."""

import warnings

import triton
from torch import Tensor

from corecontext.ops.fetch.choice import Choice
from corecontext.ops.spec import Cores, Groups, Spec, Tokens, Upstream
from corecontext.ops.triton.attend import anywhere, chosen
from corecontext.ops.triton.attend.chosen import Call
from corecontext.ops.triton.attend.far_past import FarPast, far_past, near_past
from corecontext.ops.triton.attend.marks import Marks

try:  # Gluon is young: a Triton without it, or with another, has the other kernels
    from corecontext.ops.triton.attend import hopper_backward, hopper_forward, hopper_union
except (ImportError, AttributeError):
    hopper_forward = hopper_backward = None


def attend(
    tokens: Tokens,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None = None,
    marks: Marks | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend as `packed.attend` does, but to no core token that is marked (marks.py).

    Args:
        out: [N, r, T, D] of any strides, written in place; None makes one.
    """
    far = far_past(tokens, cores, spec, mass)
    return attend_list(near_past(tokens, spec), far, spec, marks, out)


def attend_list(
    tokens: Tokens, far: FarPast, spec: Spec, marks: Marks | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend as `attend` does, to a far past whose entries are in a list (far_past.py).

    Args:
        tokens: Queries, and the raw tokens of their near past.
    """
    if tokens.q.numel() and takes_hopper(tokens.q, spec):
        try:
            return hopper_forward.attend_list(tokens, far, spec, marks, out)
        except triton.CompilationError as error:
            do_without_hopper(error)
    results, lse = anywhere.attend_list(tokens, far, spec, marks)
    return results if out is None else out.copy_(results), lse


def attend_raw(call: Call, marks: Marks, out: Tensor, lse: Tensor) -> None:
    """Attend to the raw tokens of chosen groups and merge with out [N, r, T, D] and the natural
    log-sum-exp lse [N, r, T], in place.

    Args:
        marks: `call.marks()`.
    """
    if takes_hopper(call.tokens.q, call.spec) and hopper_union.takes(call):
        try:
            hopper_union.attend(call, call.unions(marks), out, lse)
            return
        except triton.CompilationError as error:
            do_without_hopper(error)
    chosen.attend_raw(call, out, lse)


def gradients(
    upstream: Upstream,
    tokens: Tokens,
    groups: Groups,
    cores: Cores,
    spec: Spec,
    mass: Tensor | None = None,
    choice: Choice | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of q, k and v, those through pooling included; None where Hopper's
    kernels cannot, so that the caller computes those of attention and of pooling one by one."""
    if hopper_backward is None or not hopper_backward.takes(tokens.q, spec):
        return None
    try:
        return hopper_backward.gradients(upstream, tokens, groups, cores, spec, mass, choice)
    except triton.CompilationError as error:
        do_without_hopper(error)
        return None


def takes_hopper(q: Tensor, spec: Spec) -> bool:
    """Whether the kernels made for Hopper can take queries."""
    return hopper_forward is not None and hopper_forward.takes(q, spec)


def do_without_hopper(error: triton.CompilationError) -> None:
    """Drop the kernels made for Hopper, with a warning: Gluon changes from release to release.
    Nothing has been launched when it cannot compile."""
    global hopper_forward, hopper_backward
    hopper_forward = hopper_backward = None
    lines = (line for line in reversed(str(error).splitlines()) if line.strip())
    reason = next(lines, type(error).__name__)
    warnings.warn(
        f"Triton {triton.__version__} cannot compile the kernels made for Hopper, so those that "
        "run on every GPU are used, which are slower; Triton 3.6 to 3.9 can. It said: "
        f"{reason.strip()}",
        stacklevel=3,
    )
