"""Choose a model's attention: CCA or a rival, by the checkpoint's settings and the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from corecontext.config import CCAConfig, listed
from corecontext.files import UserError, one_line

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
    patterns: str | None = None
    """File with MInference's patterns of this model."""
    core_mass: bool | None = None
    """Whether CCA adds masses to core tokens' scores."""
    cache_dtype: str | None = None
    """Format of keys and values in CCA's cache."""
    full_heads: str | None = None
    """DuoAttention's KV heads that see all tokens, "LAYER:HEAD,..."."""
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


def takes(method: str) -> tuple[str, ...]:
    """Return the fields of `AttentionSizes` that a method has.

    Raises:
        UserError: there is no such method.
    """
    from corecontext.baselines.rivals import NAMES, RIVALS

    if method not in (*METHODS, *NAMES):
        raise UserError(f"method must be {listed((*METHODS, *NAMES))}, got {method!r}.")
    if method == "full":
        return ()
    if method == "cca":
        return ("group_size", "window_size", "sinks", *CCA_SETTINGS)
    return RIVALS[method].takes


def settings_for(method: str, methods: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings given to a comparison of methods that one of them is loaded with: without
    those that only others have. A setting that none has stays, for `check_sizes` to refuse."""
    others = {name for other in methods for name in takes(other)} - set(takes(method))
    return {name: value for name, value in given.items() if name not in others}


def check_sizes(method: str, sizes: AttentionSizes) -> None:
    """Raise a UserError where a setting breaks a rule, or the method does not exist or have it."""
    names = takes(method)
    for name, value in vars(sizes).items():
        if value is not None and name not in names:
            option = name.replace("_", "-")
            raise UserError(
                f"{option} must be left out with method {method!r}, which would ignore it, got "
                f"{value}."
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


def pick_rival(method: str, sizes: AttentionSizes, hf_config: Any = None) -> Any:
    """Make a rival's settings by its name, with those of the shared sizes that it has.

    Args:
        hf_config: The model's config, for a rival whose heads may come from the checkpoint.

    Raises:
        UserError: it has no such setting.
    """
    from corecontext.baselines.rivals import RIVALS, make_rival

    shared = {"group_size", "window_size"}.intersection(RIVALS[method].takes)
    settings: dict[str, Any] = {name: getattr(sizes, name) for name in shared}
    settings["sinks"] = sizes.sinks
    with one_line():
        if "full_heads" in RIVALS[method].takes:
            from corecontext.baselines.duo_attention import find_heads

            settings["full_heads"] = find_heads(sizes.full_heads, hf_config)
        if sizes.patterns is not None:
            from corecontext.baselines import read_patterns

            settings["patterns"] = read_patterns(sizes.patterns)
        return make_rival(method, **settings)


def bounded(config: Any, most: int) -> Any:
    """Return the settings with at most `most` tokens in the window and first tokens: no query sees
    further back than the model's positions, but a cache would allocate it."""
    sizes = {name: getattr(config, name, None) for name in ("window_size", "sink_size", "sinks")}
    sizes = {name: min(size, most) for name, size in sizes.items() if size is not None}
    return replace(config, **sizes)
