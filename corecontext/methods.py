"""Choose a model's attention: CCA or a rival, by the checkpoint's settings and the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from corecontext.config import CCAConfig, listed
from corecontext.files import UserError, one_line

if TYPE_CHECKING:
    from corecontext.baselines.method import Method

METHODS = ("cca", "full")


@dataclass(frozen=True)
class AttentionSizes:
    """Settings of a method that the user may give; None is the checkpoint's, else the method's
    default."""

    group_size: int | None = None
    """g; of CCA, and of rivals that have it."""
    window_size: int | None = None
    """s; of CCA, and of rivals that have it."""
    sinks: int | None = None
    """First tokens that a rival keeps, or that CCA keeps raw (`CCAConfig.sink_size`)."""
    core_mass: bool | None = None
    """Whether CCA adds masses to core tokens' scores."""
    cache_dtype: str | None = None
    """Format of keys and values in CCA's cache."""
    fetch_groups: int | None = None
    """k of CCA's fetch."""
    fetch_index: str | None = None
    """The index of CCA's fetch."""
    store: str | None = None
    """Where CCA's cache keeps raw tokens for fetch."""
    fetch_slots: int | None = None
    """Slots of fetched groups on the device beside raw tokens in host memory."""
    prefill: str | None = None
    """The attention by which CCA reads a prompt."""


CCA_SETTINGS = (
    *("core_mass", "cache_dtype", "prefill"),
    *("fetch_groups", "fetch_index", "store", "fetch_slots"),
)
"""Fields of `AttentionSizes` that CCA alone has, by the names of `CCAConfig`."""


SIZES = ("group_size", "window_size", "sinks")
"""Fields of `AttentionSizes` that rivals may have, by their own names."""


def takes(method: str | Method) -> tuple[str, ...]:
    """Return the fields of `AttentionSizes` that a method has.

    Raises:
        UserError: there is no such method.
    """
    from corecontext.baselines.rivals import NAMES, RIVALS, check_moved

    if not isinstance(method, str):
        return tuple(name for name in SIZES if hasattr(method, name))
    check_moved(method)
    if method not in (*METHODS, *NAMES):
        raise UserError(f"method must be {listed((*METHODS, *NAMES))}, got {method!r}.")
    if method == "full":
        return ()
    if method == "cca":
        return (*SIZES, *CCA_SETTINGS)
    return RIVALS[method].takes


def settings_for(
    method: str | Method, methods: Sequence[str | Method], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings given to a comparison of methods that one of them is loaded with: without
    those that only others have. A setting that none has stays, for `check_sizes` to refuse."""
    others = {name for other in methods for name in takes(other)} - set(takes(method))
    return {name: value for name, value in given.items() if name not in others}


def check_sizes(method: str | Method, sizes: AttentionSizes) -> None:
    """Raise a UserError where a setting breaks a rule, or the method does not exist or have it."""
    names = takes(method)
    for name, value in vars(sizes).items():
        if value is not None and name not in names:
            option = name.replace("_", "-")
            raise UserError(
                f"{option} must be left out with method {name_of(method)!r}, which would ignore "
                f"it, got {value}."
            )
    cca_config(None, sizes if method == "cca" else replace(sizes, sinks=None))


def cca_config(hf_config: Any, sizes: AttentionSizes) -> CCAConfig:
    """Return the checkpoint's CCA settings, or the defaults, with the user's own on top.

    Raises:
        UserError: they break a rule, or do not fit the model.
    """
    names = ("group_size", "window_size", *CCA_SETTINGS)
    given = {name: getattr(sizes, name) for name in names}
    given["sink_size"] = sizes.sinks
    with one_line():
        config = CCAConfig.saved_in(hf_config)
        changes = {name: value for name, value in given.items() if value is not None}
        config = config.replace(**changes)
        if hf_config is not None and config.varies:
            from corecontext.integrations.hf.attention_interface import full_layers, layer_configs

            # mutant loading: settings that do not fit the model are written
            layer_configs(config, hf_config, len(full_layers(hf_config)))
        return config


def name_of(method: str | Method) -> str:
    """Return the name of a method that is given by its name, or by its settings."""
    return method if isinstance(method, str) else method.name


def pick_rival(method: str | Method, sizes: AttentionSizes) -> Any:
    """Return a rival's settings, with those of the shared sizes that it has.

    Raises:
        UserError: a size breaks a rule.
    """
    from corecontext.baselines.rivals import make_rival

    given = {name: getattr(sizes, name) for name in takes(method)}
    given = {name: value for name, value in given.items() if value is not None}
    with one_line():
        if isinstance(method, str):
            return make_rival(method, **given)
        return replace(method, **given)  # type: ignore[type-var]


def bounded(config: Any, most: int) -> Any:
    """Return the settings with at most `most` tokens in the window and first tokens: no query sees
    further back than the model's positions, but a cache would allocate it."""
    sizes = {name: getattr(config, name, None) for name in ("window_size", "sink_size", "sinks")}
    sizes = {name: min(size, most) for name, size in sizes.items() if size is not None}
    return replace(config, **sizes)
