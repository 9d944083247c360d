"""Combine the records of a task's items into its numbers: the whole, then its parts."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from corecontext.record import Record

Values = Mapping[str, tuple[float, int]]
"""By the name of a part, "" for the whole: (value, number of items or tokens)."""


def group_by(records: Iterable[Record], key: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Return the records of each key, keys in the order of their first occurrence."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def mean(records: Sequence[Record]) -> float:
    """Return the mean value of records."""
    return sum(record.value for record in records) / len(records)


def scores_by(param: str, records: Sequence[Record]) -> Values:
    """Return the mean score of all items, and of the items of each value of a parameter, such as
    the position; numbers ascend."""
    groups = group_by(records, lambda record: record.params.get(param, ""))
    names = list(groups)
    if isinstance(names[0], int):
        names.sort()
    values = {str(name): (mean(groups[name]), len(groups[name])) for name in names}
    return {"": (mean(records), len(records)), **values}


def perplexities(records: Sequence[Record]) -> Values:
    """Return (perplexity, tokens) of all windows' tokens, of those in each domain, and of those in
    each bucket of positions."""
    sums: dict[str, list[float]] = {"": [0.0, 0]}  # negative log-likelihood, tokens
    for record in records:
        params = record.params
        # mutant eval: every window counts the same
        entries = [("", params["nll"], params["tokens"])]
        if params.get("domain"):
            entries.append((params["domain"], params["nll"], params["tokens"]))
        for start, end, nll, count in params["buckets"]:
            entries.append((f"{start}-{end - 1}", nll, count))
        for name, nll, count in entries:
            total = sums.setdefault(name, [0.0, 0])
            total[0] += nll
            total[1] += count
    return {
        name: (math.exp(nll / count), int(count)) for name, (nll, count) in sums.items() if count
    }
