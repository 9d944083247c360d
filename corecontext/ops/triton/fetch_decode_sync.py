"""Let the programs of a launch wait for each other, by counters in device memory, and ask for what
they read next."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def arrive(counter_ptr):
    """Count this program, after all its stores, and return how many came before."""
    tl.debug_barrier()  # the other threads have stored, too
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")


@triton.jit
def wait_for(counter_ptr, count):
    """Wait for the programs counted, and see what they stored."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < count:
        pass


@triton.jit
def prefetch(pointer, begin, end, BYTES: tl.constexpr, LINES: tl.constexpr):
    """Ask for elements begin .. end - 1, of BYTES bytes, to be brought into the chip's own cache,
    LINES lines of 128 bytes at a time; on NVIDIA's chips."""
    LINE: tl.constexpr = 128 // BYTES
    lines = tl.arange(0, LINES)
    for start in range(begin, end, LINES * LINE):
        at = tl.minimum(start + lines * LINE, end - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer + at], tl.int32, False, 1
        )
