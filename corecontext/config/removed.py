"""List the settings that earlier versions had, and refuse them in one line."""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from corecontext.config.field_checks import shown

F = TypeVar("F", bound=Callable[..., Any])


class Removed(NamedTuple):
    """Describe values of a setting that an earlier version had and this one has not."""

    field: str
    """The setting: a field of `CCAConfig` or `TrainConfig` in that version, or "recipe", the
    argument of `corecontext train`."""
    values: re.Pattern[str]
    """A regular expression that matches the removed values as text. It is compiled, which not every
    release of torch.compile can trace."""
    what: str
    """Their meaning, for the error."""
    instead: str
    """The way out, for the error: a sentence."""
    since: str = "0.2"
    """The first version without them."""
    is_field_gone: bool = False
    """Whether this version lacks the field. A saved config may have it: its other values, which
    changed nothing, are ignored."""


_SEARCH = (
    "In a clone, `python -m reproduction layers TEXT --model MODEL --heads --raw --output NEW` "
    "finds them: train from NEW."
)
REMOVED = (
    Removed(
        "fetch_index", re.compile("core"), "the index of core tokens", "Use 'mean' or 'pairs:2'."
    ),
    Removed(
        "fetch_index",
        re.compile("bounds"),
        "the index of least and largest values",
        "Use 'pairs:2'.",
    ),
    Removed(
        "fetch_index",
        re.compile(r"segments:\d+:\d+"),
        "an index of segments of a group",
        "Use 'pairs:2'.",
    ),
    Removed(
        "fetch_index", re.compile(r"parts:\d+"), "an index of means as they are", "Use 'parts:P:B'."
    ),
    Removed("prefill", re.compile("cca"), "a prompt read without fetch", "Use 'auto'."),
    Removed(
        "pooling",
        re.compile("(?!cca$).*"),
        "another rule for core tokens than the paper's",
        "Leave it out; in a clone, `python -m reproduction` has mean and max pooling.",
        is_field_gone=True,
    ),
    Removed(
        "core_heads",
        re.compile("(?!kv$).*"),
        "a core token for each query head",
        "Leave it out.",
        is_field_gone=True,
    ),
    Removed(
        "core_bias",
        re.compile(r"(?!-?0(\.0)?$).*"),
        "a number added to core tokens' scores",
        "Leave it out, or use core_mass.",
        is_field_gone=True,
    ),
    Removed(
        "learned",
        re.compile(r"(?!\(\)$|\[\]$).*"),
        "learned parameters of core tokens",
        "Leave it out, and train the model's own weights.",
        is_field_gone=True,
    ),
    Removed(
        "raw_heads",
        re.compile("(?!0$).*"),
        "a search before training for KV heads that keep every token",
        _SEARCH,
        is_field_gone=True,
    ),
    Removed("recipe", re.compile("raw"), "the recipe of KV heads that keep every token", _SEARCH),
    Removed(
        "deepspeed",
        re.compile("(?!None$).+"),
        "DeepSpeed's settings",
        "Use --fsdp.",
        is_field_gone=True,
    ),
    Removed(
        "push_to",
        re.compile("(?!None$).+"),
        "a push to the hub after training",
        "Use `hf upload NAME OUTPUT/model`.",
        is_field_gone=True,
    ),
)
"""Removed settings: a saved config, a command or a keyword that has one is refused."""

MOVED_OPTIONS = {
    "--patterns": "the patterns of MInference's heads",
    "--full-heads": "the heads that keep every token in DuoAttention",
}
"""Options, with their meaning, whose methods have moved to `reproduction`, the laboratory."""

GONE_OPTIONS = {
    "--tensor-parallel": "a model on several GPUs is vLLM's: `vllm serve MODEL "
    "--attention-backend CUSTOM --tensor-parallel-size N`",
}
"""Options that are gone, with what takes their place."""


def check_not_removed(field: str, value: Any) -> None:
    """Raise ValueError where an earlier version had this value of a setting."""
    for row in REMOVED:
        if field == row.field and row.values.fullmatch(str(value)):
            # mutant config: a removed setting is ignored
            raise ValueError(
                f"{field} must not be {shown(value)}, {row.what}, removed in version {row.since}. "
                f"{row.instead}"
            )


def without_removed(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings without the fields that this version lacks.

    Raises:
        ValueError: one of these has a removed value.
    """
    gone = [row.field for row in REMOVED if row.is_field_gone and row.field in settings]
    for field in gone:
        check_not_removed(field, settings[field])
    if not gone:
        return settings
    return {field: value for field, value in settings.items() if field not in gone}


def refuses_removed(function: F) -> F:
    """Let a function take keywords that this version lacks, and refuse their removed values."""

    @wraps(function)
    def checked(*args: Any, **settings: Any) -> Any:
        return function(*args, **without_removed(settings))

    return cast(F, checked)
