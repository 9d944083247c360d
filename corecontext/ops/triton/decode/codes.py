"""Round vectors to codes in 8 bits in a decoding step, and dequantize them (cache/eight_bit.py).

A vector has codes and one scale. KIND is a name of `config.CACHE_DTYPES`: "auto" has no codes. The
bits of fp8 (e4m3), moved to the places of float16's bits, are a float16 that is 256 times smaller:
so chips without fp8 can read it.
"""

import triton
import triton.language as tl


@triton.jit
def dequantize(codes, KIND: tl.constexpr):
    """Dequantize codes without the scale, fp8 256 times too small: `load_scales` compensates."""
    if KIND == "fp8":
        wide = codes.to(tl.int16)
        codes = ((wide & -32768) | ((wide & 127) << 7)).to(tl.float16, bitcast=True)
    return codes


@triton.jit
def load_scales(scale_ptr, entries, mask, KIND: tl.constexpr):
    """Load the scales of some entries, for the results of `dequantize`."""
    scales = tl.load(scale_ptr + entries, mask=mask, other=0.0)
    if KIND == "fp8":
        scales = scales * 256.0
    return scales


@triton.jit
def scale_of(highest, KIND: tl.constexpr):
    """Return the scale of vectors by their largest magnitudes, which become the largest codes."""
    if KIND == "fp8":
        scale = tl.div_rn(highest, 448.0)
    else:
        scale = tl.div_rn(highest, 127.0)
    return scale


@triton.jit
def round_to_codes(x, scale, KIND: tl.constexpr):
    """Divide numbers in float32 by their scale and round to those that have codes, ties to even.

    Adding and subtracting a large number rounds to its spacing: 1 at 1.5 x 2^23, 2^-9 at 1.5 x
    2^14. fp8 has that spacing below 2^-6; above it has 3 of float32's 23 bits of mantissa.
    """
    x = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
    if KIND == "fp8":
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        # mutant decoding: fp8 rounds ties up
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    else:
        x = tl.minimum(tl.maximum((x + 12582912.0) - 12582912.0, -127.0), 127.0)
    return x


@triton.jit
def codes_of(x, KIND: tl.constexpr):
    """Return the codes, as int8, of numbers from `round_to_codes`."""
    if KIND == "fp8":
        bits = (x * 0.00390625).to(tl.float16).to(tl.int16, bitcast=True)
        x = ((bits & -32768) >> 8) | ((bits >> 7) & 127)
    return x.to(tl.int8)


@triton.jit
def store_core(buffers, entry, core, pairs, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):
    """Store a core token's key or value in the dtype of the buffer, or in 8 bits with its scale.

    Args:
        buffers: Pointers to the sequence's entries and to their scales.
        entry: Number of the entry, [1].
        core: First and second columns of all pairs, [1, pairs] each, 0 where there is none.
        pairs: The numbers of these columns, [pairs] each.
    """
    buffer_ptr, scales_ptr = buffers
    scale = 0.0
    if KIND != "auto":
        scale = scale_of(tl.max(tl.maximum(tl.abs(core[0]), tl.abs(core[1])), 1), KIND)[:, None]
        tl.store(scales_ptr + entry[:, None], scale)
    for i in tl.static_range(2):
        x = core[i]
        if KIND != "auto":
            x = codes_of(round_to_codes(x, scale, KIND), KIND)
        at = entry[:, None] * HEAD_DIM + pairs[i][None, :]
        tl.store(
            buffer_ptr + at, x.to(buffer_ptr.dtype.element_ty), mask=(pairs[i] < HEAD_DIM)[None, :]
        )
