"""Configure CCA attention: its settings, their rules, and settings that are gone."""

from __future__ import annotations

from corecontext.config.cca_config import (
    BACKENDS,
    CACHE_DTYPES,
    CORE_POSITIONS,
    DEFAULT_GROUP_SIZE,
    DEFAULT_SINK_SIZE,
    DEFAULT_WINDOW_SIZE,
    FETCH_RECIPE,
    PAPER_RULE,
    PREFILLS,
    STORES,
    CCAConfig,
    field_help,
    setting_help,
)
from corecontext.config.field_checks import MOST, check_choice, check_int, did_you_mean, listed
from corecontext.config.indices import INDICES, parse_index
from corecontext.config.removed import REMOVED, Removed, refuses_removed, without_removed

__all__ = [
    "BACKENDS",
    "CACHE_DTYPES",
    "CORE_POSITIONS",
    "DEFAULT_GROUP_SIZE",
    "DEFAULT_SINK_SIZE",
    "DEFAULT_WINDOW_SIZE",
    "FETCH_RECIPE",
    "INDICES",
    "MOST",
    "PAPER_RULE",
    "PREFILLS",
    "REMOVED",
    "STORES",
    "CCAConfig",
    "Removed",
    "check_choice",
    "check_int",
    "did_you_mean",
    "field_help",
    "listed",
    "parse_index",
    "refuses_removed",
    "setting_help",
    "without_removed",
]
