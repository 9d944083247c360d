"""State the sets of settings that have a name, and what each is for."""

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """Describe a set of settings."""

    purpose: str
    """For which models it is: one line."""
    settings: dict[str, Any]
    """Fields of `CCAConfig`; all others have their defaults."""


_FETCH = {
    "group_size": 32,
    "window_size": 160,
    "sink_size": 16,
    "core_mass": True,
    "fetch_groups": 64,
    "fetch_index": "bits:2",
    "store": "host",
}
_POOLING = {
    "group_size": 16,
    "window_size": 1024,
    "sink_size": 16,
    "core_mass": True,
    "fetch_groups": 0,
    "fetch_index": "pairs:2",
    "store": "device",
}
PRESETS = {
    "default": Preset("Any model as it is: fetch, with the raw tokens in host memory.", _FETCH),
    "small": Preset(
        "The same number of raw tokens in groups of 64: the least bytes on the device.",
        _FETCH
        | {"group_size": 64, "window_size": 192, "fetch_groups": 32, "fetch_index": "pairs:2"},
    ),
    "device": Preset(
        "The same with the raw tokens on the device: for caches that fit there.",
        _FETCH | {"store": "device"},
    ),
    "pooling": Preset(
        "Core tokens alone, without fetch: for a model that was trained with them.", _POOLING
    ),
    "paper": Preset(
        "The paper's rule alone: no raw first tokens, no masses, no fetch.",
        _POOLING | {"sink_size": 0, "core_mass": False},
    ),
}
"""The presets by name. All but the paper's rule keep the first 16 tokens raw, in whole groups:
pretrained models direct much of their attention at these, and lose most of their quality where they
are pooled."""
DEFAULTS = PRESETS["default"].settings
"""The defaults of the fields of `CCAConfig`."""
PAPER_RULE = PRESETS["paper"].settings
"""The defaults of `cca_attention`, and the value of each field that a saved dict lacks: it was
written before the field existed, when the package had the paper's rule alone."""
