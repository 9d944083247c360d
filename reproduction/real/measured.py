"""Tell which attentions on a pretrained model have been measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from corecontext.record import Record

PERPLEXITIES = {"real.perplexity": "far", "real.next_perplexity": "next"}
"""Records of losses, and their tasks."""
MEASURED = ("device_bytes", "host_bytes")
"""Params that do not tell measurements apart."""


def is_measured(params: dict[str, Any], records: Sequence[Record], but: Sequence[str] = ()) -> bool:
    """Whether there is a far perplexity of these params, or one of last tokens: a row's records are
    appended together.

    Args:
        but: Params that may differ.
    """
    wanted = _identity(params, but)
    return any(
        record.params["task"] == PERPLEXITIES.get(record.name)
        and _identity(record.params, but) == wanted
        for record in records
    )


def _identity(params: Mapping[str, Any], but: Sequence[str]) -> dict[str, Any]:
    """Return the params that tell measurements apart."""
    without = (*MEASURED, "task", "prompt", *but)
    return {k: v for k, v in params.items() if v is not None and k not in without}
