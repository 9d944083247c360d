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


_FIELD = tl.constexpr(21)  # bits of a count, three of which make one whole number
_MOST_COUNT = tl.constexpr(2**21 - 1)


@triton.jit
def bisect(numbers, count, WIDE: tl.constexpr):
    """Find the `count` largest of the numbers of `order_of`, by two bounds.

    Args:
        WIDE: Quarter the distance of the bounds, rather than halve it: where several warps hold the
            numbers, they wait for each other at every count.

    Returns:
        low, high, at_low and at_high. at_low numbers are at least low: `count` or more, where so
        many exist. at_high numbers are at least high: fewer than `count`. If at_low is more than
        `count`, high is low + 1: the largest are those at least high, and some equal to low.
    """
    # Both bounds are at least 0, or both at most 0, so that their difference fits into 32 bits.
    both = tl.sum(_field(numbers >= 0, 0) + _field(numbers > _LEAST, 1), 0)
    at_high = _count(both, 0)
    is_above = at_high >= count
    low = tl.where(is_above, 0, _LEAST + 1)
    high = tl.where(is_above, tl.max(numbers, 0) + 1, 0)
    at_low = tl.where(is_above, at_high, _count(both, 1))
    at_high = tl.where(is_above, 0, at_high)
    while (at_low > count) & (high - low > 1):
        if WIDE:
            quarter = (high - low) // 4
            rest = (high - low) % 4
            first = low + quarter
            second = first + quarter + rest // 2
            third = second + quarter + (rest + 1) // 4
            counts = _field(numbers >= first, 0) + _field(numbers >= second, 1)
            counts = tl.sum(counts + _field(numbers >= third, 2), 0)
            for i in tl.static_range(3):
                middle = first if i == 0 else (second if i == 1 else third)
                at_middle = _count(counts, i)
                low, high, at_low, at_high = _narrowed(
                    low, high, at_low, at_high, middle, at_middle, count
                )
        else:
            middle = low + (high - low) // 2
            at_middle = tl.sum((numbers >= middle).to(tl.int32), 0)
            low, high, at_low, at_high = _narrowed(
                low, high, at_low, at_high, middle, at_middle, count
            )
    return low, high, at_low, at_high


@triton.jit
def _narrowed(low, high, at_low, at_high, middle, at_middle, count):
    """Return the bounds, and how many numbers reach them, once `at_middle` numbers are found to
    reach a number from low to high."""
    is_low = at_middle >= count
    is_high = (at_middle < count) & (middle < high)
    at_low = tl.where(is_low, at_middle, at_low)
    at_high = tl.where(is_high, at_middle, at_high)
    low = tl.where(is_low, middle, low)
    high = tl.where(is_high, middle, high)
    return low, high, at_low, at_high


@triton.jit
def _field(flags, place: tl.constexpr):
    """Return a count of 1 or 0 in the field `place` of a whole number."""
    return flags.to(tl.int64) << (_FIELD * place)


@triton.jit
def _count(fields, place: tl.constexpr):
    """Return the count in a field of a sum of `_field`s."""
    return ((fields >> (_FIELD * place)) & _MOST_COUNT).to(tl.int32)
