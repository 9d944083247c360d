"""Write the tables of whole models from their records: on the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.model_report import (
    NAMES,
    Place,
    by_model,
    label_of,
    labels,
    main_places,
    places,
    skipped,
)
from benchmarks.tables import (
    Column,
    markdown,
    optional,
    print_table,
    shown_bytes,
    shown_ms,
    shown_times,
)
from corecontext.record import Record
from corecontext.terminal import console

FORMATS: dict[str, Callable[[float], str]] = {
    "model.first_token_s": lambda value: shown_ms(1e3 * value),
    "model.next_token_ms": shown_ms,
    "model.cache_bytes": shown_bytes,
    "model.peak_bytes": shown_bytes,
    "model.tokens_per_s": "{:.4g}".format,
}
GAINS = dict.fromkeys(NAMES, "full / CCA") | {"model.tokens_per_s": "CCA / full"}


def title(measured: Sequence[Place]) -> str:
    """Return the title of a model's tables, which tells random weights from a checkpoint's."""
    p = measured[0].params
    config = f"g = {p['group_size']}, s = {p['window_size']}, "
    if len({place.config for place in measured}) > 1:
        config = ""
    return f"{p['shape']} ({p['weights']} weights), {p['dtype']}, {config}{measured[0].device}"


def columns(name: str, measured: Sequence[Place], length: str = "length") -> list[Column]:
    """Return a column for each method; g and s where there are several, gains and floors."""
    show = optional(FORMATS[name], "-")
    made = [Column(length, lambda place: str(place.length))]
    if len({place.config for place in measured}) > 1:
        made.append(Column("g", lambda place: str(place.config[0])))
        made.append(Column("s", lambda place: str(place.config[1])))
    made += [_method_column(name, label) for label in labels(measured, name)]
    if any(place.gain(name) for place in measured):
        gain = optional(shown_times, "-")
        made.append(Column(GAINS[name], lambda place: gain(place.gain(name))))
    for method, text in (("full", "full"), ("cca", "CCA")):
        if any((name, method) in place.floors for place in measured):
            made.append(
                Column(
                    f"least: {text}",
                    lambda place, method=method: show(place.floors.get((name, method))),  # type: ignore[misc]
                )
            )
    return made


def _method_column(name: str, label: str) -> Column:
    show = optional(FORMATS[name], "-")

    def cell(place: Place) -> str:
        text = show(place.value(name, label))
        record = place.values[name].get(label)
        if name == "model.tokens_per_s" and record is not None:
            text += f" (batch {record.params['batch']})"
        return text

    return Column(label, cell)


def _with_values(name: str, measured: Sequence[Place]) -> list[Place]:
    return [place for place in measured if place.values.get(name)]


def print_model(records: Sequence[Record]) -> None:
    """Print every value by model, name, length, g and s."""
    measured = places(records)
    for of_model in by_model(measured).values():
        console().print(title(of_model), soft_wrap=True)
        for name in NAMES:
            print_table(columns(name, of_model), _with_values(name, of_model), NAMES[name])
    if not measured:  # no CCA to compare with
        for r in records:
            if r.name in NAMES and r.params["method"] != "floor":
                console().print(
                    f"{label_of(r.params)}, L = {r.params['length']}, batch {r.params['batch']}: "
                    f"{NAMES[r.name]} {FORMATS[r.name](r.value)}"
                )
    for line in skipped(records):
        console().print(line, soft_wrap=True)


def model_markdown(records: Sequence[Record]) -> str:
    """Return the page's tables of whole models, at each model's main g and s."""
    lines: list[str] = []
    for measured in by_model(main_places(places(records))).values():
        lines += ["", f"**{title(measured)}**"]
        for name in NAMES:
            rows = _with_values(name, measured)
            if rows:
                lines += ["", *markdown(columns(name, measured, f"{NAMES[name]}: L"), rows)]
    notes = skipped(records)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines[1:]) + "\n"
