"""Choose g, s and k of a request by the load (elastic g and s, paper 4.3)."""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from corecontext.config import CCAConfig, check_int
from corecontext.visibility import group_size_for


@dataclass(frozen=True)
class Load:
    """How busy a server, or an engine, is when a request starts."""

    queue_length: int = 0
    """Waiting requests."""
    cache_bytes_used: int = 0
    """Bytes of the caches of running requests."""
    cache_bytes_budget: int | None = None
    """Bytes that caches may take; None is unlimited."""
    time_to_first_token: float | None = None
    """Seconds that the last request waited for its first token; None before the first."""
    prompt_length: int = 0
    """Tokens of the longest row of the request."""
    host_bytes_used: int = 0
    """Bytes of raw tokens in host memory of running requests."""
    host_bytes_budget: int | None = None
    """Bytes that raw tokens may take in host memory; None is unlimited."""

    @property
    def cache_share(self) -> float:
        """Share of a budget that is in use: the larger of that on the device and that in host
        memory, 0 without a budget."""
        on_device = self.cache_bytes_used / (self.cache_bytes_budget or math.inf)
        return max(on_device, self.host_bytes_used / (self.host_bytes_budget or math.inf))


Sizes = tuple[int, int] | tuple[int, int, int]
"""(group_size, window_size), or (group_size, window_size, fetch_groups)."""
SIZE_NAMES = ("group_size", "window_size", "fetch_groups")
Policy = Callable[[Load], Sizes]
"""Gives sizes for a load; two of them leave fetch_groups to the model. g and k hold for the whole
request; s may be shrunk while it runs."""


def settings_for(
    config: CCAConfig,
    group_size: int | None,
    window_size: int | None,
    prompt_length: int | None,
    policy: Policy | None,
    load: Load,
    fetch_groups: int | None = None,
) -> CCAConfig:
    """Choose the settings of a request: its own sizes, else the policy's, else the model's.

    Args:
        config: The model's settings. The result has, in place of `num_groups`, the g that it means
            for this prompt.
        group_size, window_size: The request's own sizes; None leaves them to the policy.
        prompt_length: Tokens of each row; None where rows have different lengths.
        policy: Called for sizes that the request leaves open. Its g is ignored where the model has
            a g for each layer or head; its k is at most the model's.
        load: Argument of the policy.
        fetch_groups: The request's own k, at most the model's; None leaves it to the policy.

    Raises:
        ValueError: a size breaks a rule, or `num_groups` meets rows of different lengths.
    """
    leaves_fetch_groups = fetch_groups is None and config.fetch_groups > 0
    if policy is not None and (group_size is None or window_size is None or leaves_fetch_groups):
        sizes = policy(load)
        if len(sizes) not in (2, 3):
            raise ValueError(
                "policy must give (group_size, window_size), or these and fetch_groups, got "
                f"{sizes}."
            )
        if group_size is None and not config.varies:
            group_size = sizes[0]
        if window_size is None:
            window_size = sizes[1]
        if leaves_fetch_groups and len(sizes) == 3:
            fetch_groups = min(sizes[2], config.fetch_groups)
    if fetch_groups is not None:
        # mutant serve: a request gets the model's k, not its own
        config = _with_fetch_groups(config, fetch_groups)
    if window_size is not None:
        config = config.replace(window_size=window_size)
    if group_size is None:
        if config.num_groups is None:
            return config
        if prompt_length is None:
            raise ValueError(
                "num_groups must be used with rows of one length, got different padding. Set "
                "group_size, or run the rows one by one."
            )
        group_size = group_size_for(prompt_length, config.window_size, config.num_groups)
    return config.replace(group_size=group_size, num_groups=None)


def _with_fetch_groups(config: CCAConfig, fetch_groups: int) -> CCAConfig:
    """Return the settings with another k, at most theirs; 0 fetches nothing."""
    check_int("fetch_groups", fetch_groups, 0)
    if fetch_groups > config.fetch_groups:
        raise ValueError(
            f"fetch_groups must be at most the model's {config.fetch_groups}, got {fetch_groups}. "
            "Ask for fewer, or set the model up with more."
        )
    return config.replace(fetch_groups=fetch_groups)


def cut_to(config: CCAConfig, length: int) -> CCAConfig:
    """Cut g, s and the sinks to texts of at most `length` tokens: larger sizes change no number,
    but take larger buffers."""
    names = ["window_size", "sink_size"]
    if not config.varies:
        names.append("group_size")
    cut = {name: length for name in names if getattr(config, name) > length}
    return config.replace(**cut) if cut else config


Row = tuple[float, int, int] | tuple[float, int, int, int]
"""(pressure, group_size, window_size), or with fetch_groups behind them: sizes up to this pressure,
as `TablePolicy` computes it."""


def table_rows(group_size: int, window_size: int, fetch_groups: int = 0) -> tuple[Row, ...]:
    """Return the rows of a table: these sizes up to pressure 0.5, then twice and four times the g
    with half and a quarter of the s.

    With fetch, k is lowered first, to a half and to a quarter. Where g then grows, k shrinks as
    much, so that each query sees as many raw tokens as with that quarter; it is at least 1.
    """
    if not fetch_groups:
        return tuple(
            (pressure, group_size * factor, max(1, window_size // factor))
            for pressure, factor in ((0.5, 1), (0.8, 2), (1.0, 4))
        )
    # mutant serve: g and s are lowered before k
    steps = ((0.5, 1, 1), (0.65, 1, 2), (0.8, 1, 4), (0.9, 2, 8), (1.0, 4, 16))
    return tuple(
        (
            pressure,
            group_size * factor,
            max(1, window_size // factor),
            max(1, fetch_groups // divisor),
        )
        for pressure, factor, divisor in steps
    )


@dataclass(frozen=True)
class TablePolicy:
    """Compress more, in steps, the busier the server is.

    The pressure of a load is the largest of three shares: of the cache budget, of `queue_limit` and
    of `first_token_limit`. The sizes are those of the first row whose pressure is at least that of
    the load, else of the last row.
    """

    rows: tuple[Row, ...] = table_rows(
        CCAConfig.group_size, CCAConfig.window_size, CCAConfig.fetch_groups
    )
    """By rising pressure."""
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
    def sizes(self) -> list[Sizes]:
        """All sizes that the table can give."""
        return [row[1:] for row in self.rows]

    def pressure(self, load: Load) -> float:
        """Return 0 for an idle server, 1 for a full one, more beyond a limit."""
        return max(
            load.cache_share,
            load.queue_length / self.queue_limit,
            (load.time_to_first_token or 0.0) / self.first_token_limit,
        )

    def __call__(self, load: Load) -> Sizes:
        """Return the sizes for this load."""
        pressure = self.pressure(load)
        row = next((row for row in self.rows if pressure <= row[0]), self.rows[-1])
        return row[1:]


def load_policy(name: str) -> Policy:
    """Import a policy by "module:function".

    Raises:
        ValueError: there is no such module or function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"policy must be 'elastic', 'fixed' or module:function, got {name!r}.")
    try:
        policy = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"policy {name!r} cannot be loaded: {error}. Is its folder on PYTHONPATH?"
        ) from None
    except Exception as error:  # whatever the user's module does
        raise ValueError(
            f"policy {name!r} cannot be loaded: {type(error).__name__}: {error}."
        ) from None
    if not callable(policy):
        raise ValueError(
            f"policy must be a function of a Load, got {name!r}, which cannot be called."
        )
    return policy
