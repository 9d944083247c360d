"""Report a server's latency from its records: a table, a day's figure and a rising load's."""

from collections.abc import Sequence
from typing import Any

from benchmarks.drawing import CCA, FLEX, FLOOR, FULL, pyplot, save
from benchmarks.plotting import label_lines
from benchmarks.tables import Column, markdown, optional, shown_percent
from corecontext.record import Record

COLORS = (CCA, FLOOR, FLEX, "#8a5fb0", "#b0475f")
RUN = ("mode", "model", "prompt_length", "new_tokens", "shared_length", "seconds", "seed")
three = optional("{:.3g}".format, "-")


def serving_markdown(records: Sequence[Record]) -> str:
    """Return a row for each variant (and rate), and the rates that were sustained."""
    totals = [r for r in records if r.name == "serve.requests_per_s" and "hour" not in r.params]
    lines = markdown(_columns(records), totals)
    for r in records:
        if r.name == "serve.limit_rate":
            p = r.params
            more = "" if p["reached"] else " or more, all that was offered"
            lines.append(
                f"{p['variant']}: the median request waits at most {p['first_token_limit']:g} s "
                f"for its first token at {r.value:.3g} requests a second{more}."
            )
    return "\n".join(lines)


def _columns(records: Sequence[Record]) -> list[Column]:
    """Return the columns of the table; a row is the record of its requests a second."""

    def of(total: Record, name: str) -> list[Record]:
        return [r for r in records if r.name == name and total.params.items() <= r.params.items()]

    def value(name: str, quantile: float | None = None) -> Any:
        def cell(total: Record) -> str:
            values = [r.value for r in of(total, name) if r.params.get("quantile") == quantile]
            return three(values[-1] if values else None)

        return cell

    def settings(total: Record) -> str:
        return "; ".join(
            f"{r.params['group_size']}, {r.params['window_size']}: {shown_percent(r.value)}"
            for r in of(total, "serve.setting_share")
        )

    return [
        Column("variant", lambda total: total.params["variant"], left=True),
        Column("prompt", lambda total: str(total.params["prompt_length"])),
        Column("at once", lambda total: str(total.params.get("requests", "-"))),
        Column("offered /s", lambda total: three(total.params["offered_per_s"])),
        Column("done /s", lambda total: three(total.value)),
        Column("tokens /s", value("serve.tokens_per_s")),
        Column("first token, s: 50 %", value("serve.first_token_s", 0.5)),
        Column("99 %", value("serve.first_token_s", 0.99)),
        Column("next token, ms: 50 %", value("serve.next_token_ms", 0.5)),
        Column("99 %", value("serve.next_token_ms", 0.99)),
        Column("failed", value("serve.failed")),
        Column("g, s", settings, left=True),
    ]


# Figures


def draw_serve(records: Sequence[Record], path: str, mode: str | None = None) -> None:
    """Draw the newest run of a mode, by default the last record's; none where it was not run."""
    mode = mode or records[-1].params["mode"]
    records = [r for r in records if r.params["mode"] == mode]
    if not records:
        return
    records = newest_run(records)
    figure = _draw_day(records) if mode == "day" else _draw_rising(records)
    p = records[-1].params
    weights = ", random weights" if p["random_weights"] else ""
    figure.suptitle(
        f"{_message(records, mode)}\n{p['model']}{weights}: prompts of {p['prompt_length']} "
        f"tokens, answers of {p['new_tokens']}; {records[-1].device}",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    save(figure, path)


def newest_run(records: Sequence[Record]) -> list[Record]:
    """Return the records with the settings of the last one, the newest of each variant."""
    last = {key: value for key, value in records[-1].params.items() if key in RUN}
    newest: dict[tuple, Record] = {}
    for r in records:
        if last.items() <= r.params.items() and r.device == records[-1].device:
            key = (r.name, *sorted((k, str(v)) for k, v in r.params.items()))
            newest.pop(key, None)
            newest[key] = r
    return list(newest.values())


def _message(records: Sequence[Record], mode: str) -> str:
    """Say the worst wait of each variant over the day, or its sustained rate."""
    values: dict[str, float] = {}
    for r in records:
        if mode == "day" and r.name == "serve.first_token_s" and r.params.get("quantile") == 0.99:
            values[r.params["variant"]] = max(r.value, values.get(r.params["variant"], 0.0))
        elif r.name == "serve.limit_rate":
            values[r.params["variant"]] = r.value
    texts = [f"{variant} {value:.3g}" for variant, value in values.items()]
    if mode == "day":
        return f"Longest wait of the 99th percentile over a day, seconds: {', '.join(texts)}"
    return f"Requests a second that each variant sustains: {', '.join(texts)}"


def _variants(records: Sequence[Record]) -> dict[str, str]:
    """Return each variant's color, in the order of the records."""
    names = list(dict.fromkeys(r.params["variant"] for r in records))
    colors = iter(COLORS * len(names))
    return {name: FULL if name == "full" else next(colors) for name in names}


def _series(
    records: Sequence[Record], name: str, variant: str, place: str, **params: Any
) -> tuple[list[float], list[float]]:
    """Return the places and values of one line."""
    wanted = {"variant": variant, **params}
    points = sorted(
        (r.params[place], r.value)
        for r in records
        if r.name == name
        and place in r.params
        and all(r.params.get(key) == value for key, value in wanted.items())
    )
    return [x for x, _ in points], [y for _, y in points]


def _draw_day(records: Sequence[Record]) -> Any:
    """Draw load and throughput, waiting, and the g that requests got, over a day."""
    figure, axes = pyplot().subplots(3, 1, figsize=(7.5, 7), sharex=True, layout="constrained")
    load, wait, chosen = axes
    offered = {r.params["hour"]: r.params["offered_per_s"] for r in records if "hour" in r.params}
    load.step(*zip(*sorted(offered.items())), where="mid", color="black", lw=1, label="offered")
    for variant, color in _variants(records).items():
        line = {"color": color, "label": variant}
        load.plot(*_series(records, "serve.requests_per_s", variant, "hour"), **line)
        name = "serve.first_token_s"
        wait.plot(*_series(records, name, variant, "hour", quantile=0.5), **line)
        wait.plot(*_series(records, name, variant, "hour", quantile=0.99), ":", color=color)
        mean: dict[int, float] = {}
        for r in records:
            p = r.params
            if r.name == "serve.setting_share" and "hour" in p and p["variant"] == variant:
                mean[p["hour"]] = mean.get(p["hour"], 0.0) + r.value * p["group_size"]
                chosen.scatter(p["hour"], p["group_size"], s=60 * r.value, color=color, alpha=0.5)
        if mean:
            chosen.plot(*zip(*sorted(mean.items())), **line)
    wait.set_yscale("log")
    titles = ("requests a second", "first token, s (dotted: 99 %)", "g (line: mean)")
    for axis, title in zip(axes, titles):
        _dress(axis, title)
    chosen.set_xlabel("hour", fontsize=8)
    return figure


def _draw_rising(records: Sequence[Record]) -> Any:
    """Draw waiting, time per token and throughput against the rate of requests."""
    figure, axes = pyplot().subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    names = ("serve.first_token_s", "serve.next_token_ms", "serve.tokens_per_s")
    for variant, color in _variants(records).items():
        for axis, name in zip(axes, names):
            median = None if name == "serve.tokens_per_s" else 0.5
            points = _series(records, name, variant, "rate", quantile=median)
            if points[0]:
                axis.plot(*points, color=color, marker=".", label=variant)
            points = _series(records, name, variant, "rate", quantile=0.99)
            axis.plot(*points, ":", color=color, marker=".")
    limits = [r.params["first_token_limit"] for r in records if r.name == "serve.limit_rate"]
    if limits:
        axes[0].axhline(limits[-1], color="black", linewidth=0.8)
    axes[0].set_yscale("log")
    titles = ("first token, s (dotted: 99 %)", "next token, ms (dotted: 99 %)", "tokens a second")
    for axis, title in zip(axes, titles):
        _dress(axis, title)
        axis.set_xlabel("requests a second", fontsize=8)
    return figure


def _dress(axis: Any, title: str) -> None:
    """Give a panel its title, plain numbers and a label at the end of each line."""
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(labelsize=7, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3)
    label_lines(axis)
