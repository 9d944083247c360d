"""Choose a model's attention: CCA or a rival, by the checkpoint's settings and the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from corecontext.config import PRESETS, CCAConfig, listed
from corecontext.files import UserError, one_line

if TYPE_CHECKING:
    from corecontext.baselines.method import Method

METHODS = ("cca", "full")
"""The methods that are no rivals; `baselines.rivals.NAMES` has those."""
CCA_SETTINGS = (
    *("group_size", "window_size", "sinks", "core_mass", "cache_dtype"),
    *("fetch_groups", "fetch_index", "store", "fetch_slots", "prefill"),
)
"""Settings of CCA that the user may give: fields of `CCAConfig`, but `sinks`, the name that rivals
share, is the field `sink_size`. Other fields are the checkpoint's, or have their defaults."""
SIZES_IN_TOKENS = (
    *("window_size", "sink_size", "sinks"),
    *("group_size", "head_group_sizes", "layer_group_sizes"),
)
"""Fields of CCA and of rivals that count tokens, or are tuples of such counts."""
PRESET = "preset"
"""The setting that gives all fields at once, in place of the checkpoint's; other settings change
single fields of it."""
PRESET_HELP = (
    f"Settings of CCA by name, in place of the checkpoint's: {listed(tuple(PRESETS))} "
    "(docs/choose.md). Default: the checkpoint's, else default."
)


def field_of(setting: str) -> str:
    """Return the field of `CCAConfig` that a setting is."""
    return "sink_size" if setting == "sinks" else setting


def name_of(method: str | Method) -> str:
    """Return the name of a method that is given by its name, or as a rival."""
    return method if isinstance(method, str) else method.name


def takes(method: str | Method) -> tuple[str, ...]:
    """Return the names of the settings that a method has.

    Raises:
        UserError: there is no such method.
    """
    from corecontext.baselines.rivals import NAMES, RIVALS, check_moved

    if not isinstance(method, str):
        return tuple(name for name in CCA_SETTINGS if hasattr(method, name))
    check_moved(method)
    if method not in (*METHODS, *NAMES):
        raise UserError(f"method must be {listed((*METHODS, *NAMES))}, got {method!r}.")
    if method == "full":
        return ()
    if method == "cca":
        return (PRESET, *CCA_SETTINGS)
    return RIVALS[method].takes


def settings_taken(
    method: str | Method, methods: Sequence[str | Method], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return those of the given settings with which one method of a comparison is loaded.

    A user gives settings for all `methods` together, such as `sinks`, which `full` does not take.
    Settings that only other methods take are dropped; those that none takes stay, and
    `check_settings` refuses them.
    """
    others = {name for other in methods for name in takes(other)} - set(takes(method))
    return {name: value for name, value in given.items() if name not in others}


def check_settings(method: str | Method, given: Mapping[str, Any]) -> None:
    """Raise a UserError unless the method exists, has all settings that are given, and their values
    obey the rules of `CCAConfig`; a rival checks its own `sinks`."""
    names = takes(method)
    for name, value in given.items():
        if value is not None and name not in names:
            option = name.replace("_", "-")
            raise UserError(
                f"{option} must be left out with method {name_of(method)!r}, which would ignore "
                f"it, got {value}."
            )
    cca_config(None, given if method == "cca" else {**given, "sinks": None})


def cca_config(hf_config: Any, given: Mapping[str, Any]) -> CCAConfig:
    """Return the preset that is given, else the checkpoint's CCA settings, else the defaults;
    single settings that are given replace its fields.

    Args:
        hf_config: The checkpoint's Hugging Face config; None checks the settings alone.
        given: Settings by name; None counts as not given.

    Raises:
        UserError: they break a rule, or do not fit the model.
    """
    names = [name for name in CCA_SETTINGS if given.get(name) is not None]
    with one_line():
        if given.get(PRESET) is None:
            config = CCAConfig.saved_in(hf_config)
        else:
            config = CCAConfig.preset(given[PRESET])
        config = config.replace(**{field_of(name): given[name] for name in names})
        if hf_config is not None and config.varies:
            from corecontext.integrations.hf.attention_interface import full_layers, layer_configs

            # mutant loading: settings that do not fit the model are written
            layer_configs(config, hf_config, len(full_layers(hf_config)))
        return config


def pick_rival(method: str | Method, given: Mapping[str, Any]) -> Any:
    """Return the rival of a name, or a changed copy of a rival, with those of the given settings
    that it has.

    Raises:
        UserError: a setting breaks a rule.
    """
    from corecontext.baselines.rivals import make_rival

    settings = {name: given[name] for name in takes(method) if given.get(name) is not None}
    with one_line():
        if isinstance(method, str):
            return make_rival(method, **settings)
        return replace(method, **settings)  # type: ignore[type-var]


def cut_to_positions(config: Any, most: int) -> Any:
    """Return settings of CCA or of a rival whose sizes in tokens are at most `most`, the positions
    of the model: larger ones change no result, but a cache would allocate them."""

    def cut(size: Any) -> Any:
        return tuple(map(cut, size)) if isinstance(size, tuple) else min(size, most)

    sizes = {name: getattr(config, name, None) for name in SIZES_IN_TOKENS}
    return replace(config, **{name: cut(x) for name, x in sizes.items() if x is not None})
