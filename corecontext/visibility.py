"""State which core tokens and raw tokens a query sees: the integer rules.

These are eq. 4 to 7 and 13 of docs/math.md. Positions count from 0 within one sequence. With g = 4
and s = 3 the query at position 10 sees the core tokens of positions 0 to 3 and 4 to 7, and the raw
tokens 8, 9 and 10. `ops/triton/primitives.py` states the rules for kernels. The functions take
integers; those with `positions` take integer tensors on any device.

Where the first n tokens stay raw (sinks, n a multiple of g), the tokens after them form a sequence
of their own: subtract n from its positions. Functions that take `sinks` count from the first token
of the text instead.
"""


def num_sinks(sink_size: int, group_size: int) -> int:
    """Count the first tokens that are never pooled: n is sink_size, rounded up to whole groups."""
    # mutant sinks: a group too many stays raw
    return -(-sink_size // group_size) * group_size


def num_far_entries(groups: int, group_size: int, sinks: int) -> int:
    """Count the entries of a far past of c = `groups` groups, those of the first n = `sinks` tokens
    included: min(c g, n) raw tokens and max(0, c - n / g) core tokens (docs/math.md, eq. 13)."""
    return min(groups * group_size, sinks) + max(0, groups - sinks // group_size)


def num_complete_groups(seq_len: int, group_size: int) -> int:
    """Count the groups whose last token has been seen, so that their core token exists: L // g, and
    0 for negative L."""
    return max(0, seq_len) // group_size


def num_visible_cores(position: int, group_size: int, window_size: int) -> int:
    """Count the core tokens that the query at t = `position` sees, those of all groups that end
    before its window: j(t) = max(0, (t + 1 - s) // g)."""
    # mutant rule: one core token too late
    return max(0, (position + 1 - window_size) // group_size)


def visible_cores_of(positions, group_size: int, window_size: int):
    """Apply `num_visible_cores` to a tensor of positions, any shape, integer dtype."""
    return ((positions + 1 - window_size) // group_size).clamp(min=0)


def sees_core(cores, positions, group_size: int, window_size: int):
    """Mask the core tokens `cores`, numbers from 0, that queries at `positions` see: two tensors
    that broadcast in, their shape out."""
    return cores < visible_cores_of(positions, group_size, window_size)


def sees_token(keys, positions, group_size: int, window_size: int, sinks: int = 0):
    """Mask the raw tokens at positions `keys` that queries see: the first n = `sinks`, and those
    after the visible core tokens' groups, up to the query itself. Two tensors that broadcast in,
    their shape out."""
    seen = keys >= visible_cores_of(positions, group_size, window_size) * group_size
    if sinks:
        seen = seen | (keys < sinks)
    return seen & (keys <= positions)


def local_start(position: int, group_size: int, window_size: int) -> int:
    """Return the position of the first raw token that a query sees: the first after its visible
    core tokens' groups. It sees all from there to itself."""
    return num_visible_cores(position, group_size, window_size) * group_size


def first_core_query(group_size: int, window_size: int) -> int:
    """Return the first position whose query sees a core token: s + g - 1. Shorter sequences have
    full attention."""
    return window_size + group_size - 1


def window_capacity(group_size: int, window_size: int) -> int:
    """Count the raw tokens that a cache must keep for later queries: s + g - 1, the query's own
    included."""
    return window_size + group_size - 1


def is_full_attention(seq_len: int, group_size: int, window_size: int, sinks: int = 0) -> bool:
    """Whether CCA is exactly full causal attention: no query sees a core token, or groups are
    single tokens."""
    # mutant sinks: full attention for one token too many
    return group_size == 1 or seq_len - sinks <= first_core_query(group_size, window_size)


def group_size_for(seq_len: int, window_size: int, num_groups: int) -> int:
    """Return the group size that keeps the number of groups constant: max(1, ceil((L - s) / m)),
    docs/math.md, eq. 7."""
    return max(1, -(-(seq_len - window_size) // num_groups))


def num_scores(seq_len: int, group_size: int, window_size: int, sinks: int = 0) -> int:
    """Count query-key pairs of one head over a whole sequence: the query at t has j(t) core tokens
    and t + 1 - j(t) g raw ones. The sum over t, in closed form."""
    if sinks:
        # Pairs among the first tokens, of later queries with them, and among the later tokens.
        first = min(seq_len, sinks)
        later = seq_len - first
        return first * (first + 1) // 2 + later * first + num_scores(later, group_size, window_size)
    # The first g queries that see a core token see one each, the next g two, and so on.
    core_queries = max(0, seq_len - first_core_query(group_size, window_size))
    whole, rest = divmod(core_queries, group_size)
    cores = group_size * whole * (whole + 1) // 2 + rest * (whole + 1)  # sum of j(t)
    return seq_len * (seq_len + 1) // 2 - (group_size - 1) * cores
