"""Settings: fields, rules and help texts in cca_config.py, defaults in presets.py, removed ones in
removed.py."""

from corecontext.config.cca_config import (
    BACKENDS,
    CACHE_DTYPES,
    CORE_POSITIONS,
    PREFILLS,
    STORES,
    CCAConfig,
    field_help,
    setting_help,
)
from corecontext.config.field_checks import MOST, check_choice, check_int, did_you_mean, listed
from corecontext.config.indices import INDICES, parse_index
from corecontext.config.presets import PAPER_RULE, PRESETS
from corecontext.config.removed import (
    GONE_OPTIONS,
    MOVED_OPTIONS,
    REMOVED,
    Removed,
    check_not_removed,
    refuses_removed,
    without_removed,
)

__all__ = [
    "BACKENDS",
    "CACHE_DTYPES",
    "CORE_POSITIONS",
    "GONE_OPTIONS",
    "INDICES",
    "MOST",
    "MOVED_OPTIONS",
    "PAPER_RULE",
    "PREFILLS",
    "PRESETS",
    "REMOVED",
    "STORES",
    "CCAConfig",
    "Removed",
    "check_choice",
    "check_int",
    "check_not_removed",
    "did_you_mean",
    "field_help",
    "listed",
    "parse_index",
    "refuses_removed",
    "setting_help",
    "without_removed",
]
