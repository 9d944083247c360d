"""Compute the share of full attention's gain over sinks and window that each method keeps."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from corecontext.record import Record, append_records, make_record, read_records
from reproduction.real.measured import MEASURED, PERPLEXITIES
from reproduction.real.training import Adaptation

GAINS = {"real.perplexity": "real.gain_kept", "real.next_perplexity": "real.next_gain_kept"}
"""Records of losses, and those of their gains."""
SAME = ("model", "trained_tokens", "seed", "length", "windows", "rope_theta", "next_tokens")
"""Params that a method shares with the two that bound its gain."""
TRAINING = ("distil", "layer_steps", "strategy", "lora_rank", "train_text", "head_needles")
"""Params of another training than the protocol's, which the two that bound the gain have."""
ENDS = {"streaming_llm": "0 %", "full": "100 %"}
"""Methods that bound the gain, by definition, trained by the protocol or not at all."""


def is_other_training(params: Mapping[str, Any]) -> bool:
    """Whether a training is not the protocol's."""
    rate = params.get("learning_rate", Adaptation.learning_rate)
    return rate != Adaptation.learning_rate or any(name in params for name in TRAINING)


def is_end(params: Mapping[str, Any]) -> bool:
    """Whether a row bounds the gains of others."""
    return params["method"] in ENDS and not is_other_training(params)


def gain_kept(perplexity: float, window: float, full: float) -> float:
    """Return ln(window / perplexity) / ln(window / full): 0 for sinks and window, 1 for full
    attention."""
    return math.log(window / perplexity) / math.log(window / full)


def latest_losses(records: Iterable[Record]) -> list[Record]:
    """Return the latest perplexity of far halves, and of last tokens, of each method and size, in
    the order of their first measurement."""
    latest: dict[str, Record] = {}
    for record in records:
        if record.params["task"] == PERPLEXITIES.get(record.name):
            params = {k: v for k, v in record.params.items() if k not in MEASURED}
            latest[repr(sorted(params.items()))] = record
    return list(latest.values())


def gain_records(records: Sequence[Record], window_size: int) -> tuple[list[Record], str]:
    """Return the gains that the records do not have yet, and a line about the rows that have none,
    with the rows that they need; "" where all have one.

    Args:
        window_size: The window of the sinks and window that keep 0 %.
    """
    losses = latest_losses(records)
    measured = [record.params for record in records if record.name in GAINS.values()]
    gains = []
    without = []
    missing = []
    for record in losses:
        if is_end(record.params):
            continue
        ends = []
        for method in ENDS:
            wanted = {"method": method, **{name: record.params.get(name) for name in SAME}}
            wanted |= dict.fromkeys(TRAINING)
            if record.params["trained_tokens"]:
                wanted["learning_rate"] = Adaptation.learning_rate
            if method == "streaming_llm":
                wanted["window_size"] = window_size
            end = _find(losses, wanted)
            if end is None:
                missing.append(_named(wanted))
            else:
                ends.append(end.value)
        if len(ends) < 2:
            without.append(_named({name: record.params.get(name) for name in ("method", *SAME)}))
            continue
        if ends[0] <= ends[1]:
            continue
        # A gain names the values that it is made of: measured again, they make another.
        window, full = ends
        params = {**record.params, "over": window_size, "of": [window, record.value, full]}
        if params not in measured:
            kept = gain_kept(record.value, window, full)
            name = GAINS[record.name]
            gains.append(make_record(name, kept, params, device=record.device))
    if not missing:
        return gains, ""
    rows, needed = ("; ".join(dict.fromkeys(names)) for names in (without, missing))
    return gains, f"no gain without their ends: {rows}. Measure {needed}."


def _named(params: Mapping[str, Any]) -> str:
    """Return the params of a row that it has, by name."""
    return ", ".join(f"{name} {value}" for name, value in params.items() if value is not None)


def _find(losses: Sequence[Record], wanted: dict) -> Record | None:
    """Return the last record with these params; None stands for a param that is absent."""
    for record in reversed(losses):
        if all(record.params.get(name) == value for name, value in wanted.items()):
            return record
    return None


def append_gains(output: str, window_size: int) -> None:
    """Append the share of full attention's gain of each measured method that has none yet, and
    print which rows can have none.

    Args:
        window_size: The window of the sinks and window that keep 0 %.
    """
    gains, missing = gain_records(read_records(output), window_size)
    append_records(output, gains)
    for record in gains:
        print(f"{record.params['method']}: {record.name} {record.value:.4f}")
    if missing:
        print(missing, file=sys.stderr)
