"""Find the k largest scores by bisection of whole numbers in their order: device functions."""

import triton
import triton.language as tl

_MOST = tl.constexpr(0x7F800001)  # one above +infinity; stands for NaN
_LEAST = tl.constexpr(-0x7FFFFFF0)  # below -infinity, which is -0x7F800000


@triton.jit
def order_of(scores, exists):
    """Return whole numbers in the order of float32 scores, by their bits; _LEAST where none is."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, -(bits & 0x7FFFFFFF), tl.minimum(bits, _MOST))
    return tl.where(exists, bits, _LEAST)


@triton.jit
def bisect(numbers, count):
    """Find the `count` largest of the numbers of `order_of`, by two bounds.

    Returns:
        low, high, at_low and at_high. at_low numbers are at least low: `count` or more, where so
        many exist. at_high numbers are at least high: fewer than `count`. If at_low is more than
        `count`, high is low + 1: the largest are those at least high, and some equal to low.
    """
    # Both bounds are at least 0, or both at most 0, so that their difference fits into 32 bits.
    at_high = tl.sum((numbers >= 0).to(tl.int32), 0)
    is_above = at_high >= count
    low = tl.where(is_above, 0, _LEAST + 1)
    high = tl.where(is_above, tl.max(numbers, 0) + 1, 0)
    at_low = tl.where(is_above, at_high, tl.sum((numbers >= low).to(tl.int32), 0))
    at_high = tl.where(is_above, 0, at_high)
    while (at_low > count) & (high - low > 1):
        middle = low + (high - low) // 2
        at_middle = tl.sum((numbers >= middle).to(tl.int32), 0)
        enough = at_middle >= count
        at_low = tl.where(enough, at_middle, at_low)
        at_high = tl.where(enough, at_high, at_middle)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, high, at_low, at_high
