"""Hold functions to check a setting with; the bounds of each setting are in cca_config.py."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any

MOST = 2**31 - 1
"""The largest size: kernels count tokens in 32-bit integers."""
SHOWN = 100
"""Characters of a value that an error quotes."""


def shown(value: Any) -> str:
    """Return a value as an error quotes it: a long one by its first characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def check_int(name: str, value: Any, least: int, why: str = "") -> int:
    """Return value, or raise unless it is an int from `least` to `MOST`; `why` gives the reason of
    the least one in the error."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {shown(value)} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{name} must be at least {least}{why}, got {shown(value)}.")
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {shown(value)}.")
    return value


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return value, or raise unless it is one of the allowed words."""
    if value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}."
            + did_you_mean(value, allowed)
        )
    return value


def optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return a check that accepts None, and else checks as the given one."""
    return lambda name, value: None if value is None else check(name, value)


def check_tuple(name: str, value: Any, check: Callable[[str, Any], Any]) -> tuple[Any, ...]:
    """Return a tuple or list as a tuple of checked items, or raise."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be a tuple, got {shown(value)}.")
    return tuple(check(name, item) for item in value)


def check_sizes(name: str, value: Any) -> tuple[int, ...]:
    """Return g of each KV head as a tuple, or raise."""
    sizes = check_tuple(name, value, partial(check_int, least=1))
    if not sizes:
        raise ValueError(f"{name} must not be empty, got {sizes}.")
    return sizes


def check_sizes_by_layer(name: str, value: Any) -> tuple[int | tuple[int, ...], ...]:
    """Return a tuple with g of each layer, or a tuple of g by KV head for it, or raise."""
    layers = check_tuple(name, value, _size_or_sizes)
    if not layers:
        raise ValueError(f"{name} must not be empty, got {layers}.")
    return layers


def _size_or_sizes(name: str, value: Any) -> int | tuple[int, ...]:
    """Return a layer's g, or a tuple of g by KV head, or raise."""
    check = check_sizes if isinstance(value, (tuple, list)) else partial(check_int, least=1)
    return check(name, value)


def check_flag(name: str, value: Any) -> bool:
    """Return value, or raise unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}.")
    return value


def listed(names: tuple[str, ...]) -> str:
    """Join names as a sentence does: "a, b or c"."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def did_you_mean(value: Any, names: Iterable[str]) -> str:
    """Return a hint for an error, " Did you mean 'x'?", with the name most like a value; "" where
    none is like it."""
    near = get_close_matches(str(value), names, 1)
    return f" Did you mean {near[0]!r}?" if near else ""
