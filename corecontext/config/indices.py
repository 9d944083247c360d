"""List the indices of fetch, and read their names."""

import re
from typing import Any, NamedTuple

from corecontext.config.field_checks import did_you_mean, listed, shown

INDICES = {
    "mean": "corecontext.ops.fetch.mean:Mean",
    "parts:P:B": "corecontext.ops.fetch.low_bits:Parts",
    "pairs:B": "corecontext.ops.fetch.low_bits:Pairs",
    "bits:B": "corecontext.ops.fetch.low_bits:Bits",
    "oracle": "corecontext.ops.fetch.oracle:Oracle",
}
"""The class of each index of fetch, as "module:class", by the form of its name. P stands for a
number of parts, at least 1, and B for bits, 1, 2 or 4: "parts:4:2" is a name."""
_NUMBERS = {"P": "([1-9][0-9]{0,8})", "B": "([124])"}
# Compiled here: torch.compile cannot trace that in all releases.
_PATTERNS = tuple(
    (re.compile(":".join(_NUMBERS.get(word, word) for word in form.split(":"))), where)
    for form, where in INDICES.items()
)


class IndexName(NamedTuple):
    """Hold the class of an index and its arguments, as the name says them."""

    where: str
    """The class, a value of `INDICES`."""
    numbers: tuple[int, ...]
    """Its arguments: P and B, in the order of the name."""


def parse_index(name: str) -> IndexName:
    """Read the name of an index.

    Raises:
        ValueError: no index has this name.
    """
    for pattern, where in _PATTERNS:
        match = pattern.fullmatch(name) if isinstance(name, str) else None
        if match:
            return IndexName(where, tuple(map(int, match.groups())))
    raise ValueError(
        f"fetch_index must be {listed(tuple(map(repr, INDICES)))}, got {shown(name)}."
        + did_you_mean(name, INDICES)
    )


def check_index(name: str, value: Any) -> str:
    """Return value, or raise unless it is the name of an index."""
    parse_index(value)
    return value
