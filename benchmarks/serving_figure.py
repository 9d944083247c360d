"""Figures of a served day, and of a rising load, from their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from corecontext.drawing import CCA, FLEX, FLOOR, FULL, pyplot, save
from corecontext.record import Record

COLOURS = (CCA, FLOOR, FLEX, "#8a5fb0", "#b0475f")


def draw_serve(records: Sequence[Record], path: str, mode: str | None = None) -> None:
    """Draw the newest run of a mode, by default the last record's."""
    if not records:
        return
    mode = mode or records[-1].params["mode"]
    records = [record for record in records if record.params["mode"] == mode]
    if not records:
        return
    records = newest_run(records)
    (draw_day if records[-1].params["mode"] == "day" else draw_rising)(records, path)


def newest_run(records: Sequence[Record]) -> list[Record]:
    """Records with the settings of the last one, of each variant the newest."""
    last = {
        k: v
        for k, v in records[-1].params.items()
        if k in ("mode", "model", "prompt_length", "new_tokens", "shared_length", "seconds", "seed")
    }
    kept: dict[tuple, Record] = {}
    for r in records:
        if last.items() <= r.params.items() and r.device == records[-1].device:
            key = (r.name, *sorted((k, str(v)) for k, v in r.params.items()))
            kept.pop(key, None)
            kept[key] = r
    return list(kept.values())


def _variants(records: Sequence[Record]) -> dict[str, str]:
    """Each variant's colour, in the order of the records."""
    names = list(dict.fromkeys(r.params["variant"] for r in records))
    colours = iter(COLOURS * len(names))
    return {name: FULL if name == "full" else next(colours) for name in names}


def _title(figure: Any, records: Sequence[Record]) -> None:
    p = records[-1].params
    weights = ", random weights" if p["random_weights"] else ""
    figure.suptitle(
        f"{p['model']}{weights}: prompts of {p['prompt_length']} tokens, answers of {p['new_tokens']}; "
        f"{records[-1].device}",
        fontsize=8,
    )


def _series(
    records: Sequence[Record], name: str, variant: str, place: str, **params: Any
) -> tuple[list, list]:
    """Places and values of one line."""
    found = sorted(
        (r.params[place], r.value)
        for r in records
        if r.name == name
        and place in r.params
        and r.params["variant"] == variant
        and all(r.params.get(k) == v for k, v in params.items())
    )
    return [x for x, _ in found], [y for _, y in found]


def draw_day(records: Sequence[Record], path: str) -> None:
    """Load and throughput, waiting, and what g requests got, over a day."""
    figure, (load, wait, chosen) = pyplot().subplots(
        3, 1, figsize=(7, 6.5), sharex=True, layout="constrained"
    )
    variants = _variants(records)
    offered = sorted(
        {(r.params["hour"], r.params["offered_per_s"]) for r in records if "hour" in r.params}
    )
    load.step(*zip(*offered), where="mid", color="black", linewidth=1, label="offered")
    for variant, colour in variants.items():
        load.plot(
            *_series(records, "serve.requests_per_s", variant, "hour"), color=colour, label=variant
        )
        wait.plot(
            *_series(records, "serve.first_token_s", variant, "hour", quantile=0.5),
            color=colour,
            label=variant,
        )
        wait.plot(
            *_series(records, "serve.first_token_s", variant, "hour", quantile=0.99),
            color=colour,
            linestyle=":",
        )
        shares = [
            r
            for r in records
            if r.name == "serve.setting_share"
            and "hour" in r.params
            and r.params["variant"] == variant
        ]
        mean: dict[int, float] = {}
        for r in shares:
            mean[r.params["hour"]] = (
                mean.get(r.params["hour"], 0.0) + r.value * r.params["group_size"]
            )
            chosen.scatter(
                r.params["hour"], r.params["group_size"], s=60 * r.value, color=colour, alpha=0.5
            )
        chosen.plot(*zip(*sorted(mean.items())) if mean else ([], []), color=colour, label=variant)
    load.set_ylabel("requests a second")
    wait.set_ylabel("first token, s\n(dotted: 99 %)")
    wait.set_yscale("log")
    chosen.set_ylabel("g (line: mean)")
    chosen.set_xlabel("hour")
    for axis in (load, wait, chosen):
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    _title(figure, records)
    save(figure, path)


def draw_rising(records: Sequence[Record], path: str) -> None:
    """Waiting, time per token and throughput against the rate of requests."""
    figure, axes = pyplot().subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    for variant, colour in _variants(records).items():
        for axis, name in zip(
            axes, ("serve.first_token_s", "serve.next_token_ms", "serve.tokens_per_s")
        ):
            quantiles: tuple = (None,) if name == "serve.tokens_per_s" else (0.5, 0.99)
            for quantile, line in zip(quantiles, ("-", ":")):
                axis.plot(
                    *_series(records, name, variant, "rate", quantile=quantile),
                    line,
                    color=colour,
                    marker=".",
                    label=variant if line == "-" else None,
                )
    limits = [r.params["first_token_limit"] for r in records if r.name == "serve.limit_rate"]
    if limits:
        axes[0].axhline(limits[-1], color="black", linewidth=0.8)
    for axis, label in zip(
        axes, ("first token, s (dotted: 99 %)", "next token, ms (dotted: 99 %)", "tokens a second")
    ):
        axis.set(xlabel="requests a second", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=7)
    _title(figure, records)
    save(figure, path)
