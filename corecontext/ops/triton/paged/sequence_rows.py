"""Read keys or values of a sequence: old tokens in pages, new ones where the step has them, so that
no program waits for another one to store them."""

import triton
import triton.language as tl

from corecontext.ops.triton.paged.pages import page_offsets


@triton.jit
def rows_of(tokens, exists, sequence, page_strides, PAGE: tl.constexpr):
    """Find tokens of a sequence.

    Args:
        tokens: Their numbers in the sequence.
        exists: Which of them to find.
        sequence: Pointer to its block table, and its tokens before the new ones.
        page_strides: Of pages, and of entries in a page.
        PAGE: Entries of a page.

    Returns:
        Which are old, their offsets from the first page in int64, which are new, and their numbers
        among the new ones in int64.
    """
    table_ptr, past = sequence
    # mutant vllm: new tokens are read from their pages
    is_new = exists & (tokens >= past)
    is_old = exists & ~is_new
    at = page_offsets(table_ptr, tokens, is_old, page_strides, PAGE)
    return is_old, at, is_new, (tokens - past).to(tl.int64)


@triton.jit
def load_rows(source, rows, cols, in_cols):
    """Load columns of the keys, or the values, of tokens, [tokens, columns] in the dtype of pages;
    0 for those that do not exist.

    Args:
        source: Pointers to the pages and to the sequence's first new token, both of a KV head, and
            the stride of new tokens.
        rows: As of `rows_of`.
        in_cols: Which columns exist.
    """
    pages_ptr, new_ptr, new_stride = source
    is_old, at, is_new, number = rows
    mask = is_old[:, None] & in_cols[None, :]
    old = tl.load(pages_ptr + at[:, None] + cols[None, :], mask=mask, other=0.0)
    new_at = number * new_stride
    mask = is_new[:, None] & in_cols[None, :]
    new = tl.load(new_ptr + new_at[:, None] + cols[None, :], mask=mask, other=0.0)
    # Rounded as pages hold them, so that chunks of a prompt make what one pass makes.
    return tl.where(is_new[:, None], new.to(old.dtype), old)
