"""Split masses into numbers in half precision, whose sum a matrix product adds to the scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from corecontext.ops.triton.launch import ceil_div, launch

MASS_PARTS = 16
"""Numbers whose sum is a mass: three, for float32's precision, then zeros, as products take 16."""
_ROWS = 128


@triton.jit(do_not_specialize=["num_entries", "mass_stride"])
def mass_parts_kernel(
    mass_ptr, parts_ptr, num_entries, scale, mass_stride, PARTS: tl.constexpr, ROWS: tl.constexpr
):
    """Write each mass over the scale, which multiplies the sum later, as numbers in half precision.

    Grid: (tiles of ROWS entries, N).
    """
    n = tl.program_id(1).to(tl.int64)
    entries = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = entries < num_entries
    rest = tl.load(mass_ptr + n * mass_stride + entries, mask=exists, other=0.0) / scale
    column = tl.arange(0, PARTS)[None, :]
    terms = tl.zeros([ROWS, PARTS], parts_ptr.dtype.element_ty)  # [ROWS, PARTS]
    for i in tl.static_range(3):
        rounded = rest.to(parts_ptr.dtype.element_ty)
        terms = tl.where(column == i, rounded[:, None], terms)
        rest -= rounded.to(tl.float32)
    place = (n * num_entries + entries)[:, None] * PARTS + column
    tl.store(parts_ptr + place, terms, mask=exists[:, None])


def mass_parts(mass: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return numbers [N, 1, E, MASS_PARTS] in `dtype` whose sums are mass / scale, [N, E]."""
    n, num_entries = mass.shape
    terms = torch.empty(n, 1, num_entries, MASS_PARTS, dtype=dtype, device=mass.device)
    launch(
        mass_parts_kernel,
        (ceil_div(num_entries, _ROWS), n),
        (mass, terms, num_entries, scale, mass.stride(0)),
        PARTS=MASS_PARTS,
        ROWS=_ROWS,
        num_warps=4,
    )
    return terms
