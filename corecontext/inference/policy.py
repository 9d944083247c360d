"""Elastic g and s (paper 4.3): which group and window size a request gets, by how busy the server
is."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """How busy a server is when a request starts."""

    queue_length: int = 0
    """Requests that wait."""
    cache_bytes_used: int = 0
    """Bytes of the caches of running requests."""
    cache_bytes_budget: int | None = None
    """Bytes that caches may take; None is unlimited."""
    time_to_first_token: float | None = None
    """Seconds that the last request waited for its first token; None before the first."""
    prompt_length: int = 0
    """Tokens of the longest row of the request."""

    @property
    def cache_share(self) -> float:
        """Share of the budget in use, 0 without a budget."""
        return self.cache_bytes_used / self.cache_bytes_budget if self.cache_bytes_budget else 0.0


Policy = Callable[[Load], tuple[int, int]]
"""Gives (group_size, window_size) for a load. g holds for the whole request; s may be shrunk while
it runs."""


@dataclass(frozen=True)
class TablePolicy:
    """Compress more, in steps, the busier it is.

    The pressure of a load is the largest of three shares: of the cache budget, of `queue_limit` and
    of `first_token_limit`. The first row whose first entry is at least the pressure decides, else
    the last row.
    """

    rows: tuple[tuple[float, int, int], ...] = ((0.5, 16, 1024), (0.8, 32, 512), (1.0, 64, 256))
    """(pressure, group_size, window_size), by rising pressure."""
    queue_limit: int = 32
    """Waiting requests that count as pressure 1."""
    first_token_limit: float = 30.0
    """Seconds to the first token that count as pressure 1."""

    def __post_init__(self) -> None:
        pressures = [row[0] for row in self.rows]
        if not pressures or pressures != sorted(set(pressures)):
            raise ValueError(
                f"rows must rise in pressure, got {pressures}. Sort them, one row each."
            )
        for name in ("queue_limit", "first_token_limit"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}.")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Every (group_size, window_size) that it may give."""
        return [(g, s) for _, g, s in self.rows]

    def pressure(self, load: Load) -> float:
        """0 when idle, 1 when full."""
        return max(
            load.cache_share,
            load.queue_length / self.queue_limit,
            (load.time_to_first_token or 0.0) / self.first_token_limit,
        )

    def __call__(self, load: Load) -> tuple[int, int]:
        """(group_size, window_size) for this load."""
        pressure = self.pressure(load)
        row = next((row for row in self.rows if pressure <= row[0]), self.rows[-1])
        return row[1], row[2]


def table_around(group_size: int, window_size: int, **limits: float) -> TablePolicy:
    """The default table of a server: a model's own g and s until it is half full, then twice and
    four times the g at half and a quarter of the s.

    Args:
        group_size, window_size: The model's own.
        limits: `queue_limit` and `first_token_limit` of `TablePolicy`.
    """
    rows = tuple(
        (pressure, group_size * by, max(1, window_size // by))
        for pressure, by in ((0.5, 1), (0.8, 2), (1.0, 4))
    )
    return TablePolicy(rows, **limits)  # type: ignore[arg-type]


def load_policy(name: str) -> Policy:
    """A policy written elsewhere, by "module:function".

    Raises:
        ValueError: there is no such module or function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"policy must be 'elastic', 'fixed' or module:function, got {name!r}.")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"policy {name!r} cannot be loaded: {error}. Is its folder on PYTHONPATH?"
        ) from None
    if not callable(found):
        raise ValueError(
            f"policy must be a function of a Load, got {name!r}, which cannot be called."
        )
    return found
