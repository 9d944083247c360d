"""Tables of whole models, from their records: on the terminal and in README."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

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
from benchmarks.operator_tables import shown_ms
from corecontext.record import Record
from corecontext.terminal import console

BEST = {
    "model.first_token_s": "full / CCA",
    "model.next_token_ms": "full / CCA",
    "model.cache_bytes": "full / CCA",
    "model.peak_bytes": "full / CCA",
    "model.tokens_per_s": "CCA / full",
}


def shown(name: str, value: float | None) -> str:
    """A value in its unit, with three figures; "-" for none."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        size, unit = (2**30, "GiB") if value >= 2**29 else (2**20, "MiB")
        return f"{value / size:.3g} {unit}"
    if name == "model.tokens_per_s":
        return f"{value:.4g}"
    return shown_ms(value * 1e3 if name.endswith("_s") else value)


def title(found: Sequence[Place]) -> str:
    """Of a model's tables: the weights are said to be random where they are."""
    p, sizes = found[0].params, {_sizes(place) for place in found}
    pair = "" if len(sizes) > 1 else f"g = {p['group_size']}, s = {p['window_size']}, "
    return f"{p['shape']} ({p['weights']} weights), {p['dtype']}, {pair}{found[0].device}"


def _sizes(place: Place) -> tuple[int, int]:
    return place.params["group_size"], place.params["window_size"]


def cells(name: str, found: Sequence[Place]) -> list[list[str]]:
    """Head and body of one table: a line for each length, and g and s where there are several; a
    column a method."""
    columns = labels(found, name)
    floors = [of for of in ("full", "cca") if any((name, of) in place.floors for place in found)]
    gains = any(place.gain(name) for place in found)
    several = len({_sizes(place) for place in found}) > 1
    head = [
        "length",
        *(("g", "s") if several else ()),
        *columns,
        *([BEST[name]] if gains else []),
        *(f"least: {'CCA' if of == 'cca' else of}" for of in floors),
    ]
    body = []
    for place in found:
        records = place.values.get(name, {})
        if records:
            row = [
                shown(name, place.value(name, label))
                + (
                    f" (batch {records[label].params['batch']})"
                    if name == "model.tokens_per_s" and label in records
                    else ""
                )
                for label in columns
            ]
            gain = place.gain(name)
            body.append(
                [
                    str(place.length),
                    *(map(str, _sizes(place)) if several else ()),
                    *row,
                    *(["-" if gain is None else f"{gain:.2f}x"] if gains else []),
                    *(shown(name, place.floors.get((name, of))) for of in floors),
                ]
            )
    return [head, *body]


def print_model(records: Sequence[Record]) -> None:
    """Every value by model, name, length, g and s."""
    found = places(records)
    for of_model in by_model(found).values():
        console().print(title(of_model), soft_wrap=True)
        for name in NAMES:
            head, *body = cells(name, of_model)
            if body:
                table = Table(
                    title=NAMES[name], box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0)
                )
                for column in head:
                    table.add_column(column, justify="right")
                for row in body:
                    table.add_row(*row)
                console().print(table)
    for r in records if not found else ():  # no CCA to compare with
        if r.name in NAMES and r.params["method"] != "floor":
            console().print(
                f"{label_of(r.params)}, L = {r.params['length']}, batch {r.params['batch']}: "
                f"{NAMES[r.name]} {shown(r.name, r.value)}"
            )
    for line in skipped(records):
        console().print(line, soft_wrap=True)


def model_markdown(records: Sequence[Record]) -> str:
    """README's tables of whole models, at the g and s of most lengths."""
    lines: list[str] = []
    for found in by_model(main_places(places(records))).values():
        lines += ["", f"**{title(found)}**"]
        for name in NAMES:
            head, *body = cells(name, found)
            if body:
                lines += [
                    "",
                    "| " + " | ".join((f"{NAMES[name]}: L", *head[1:])) + " |",
                    "|" + "---:|" * len(head),
                    *("| " + " | ".join(row) + " |" for row in body),
                ]
    notes = skipped(records)
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines[1:]) + "\n"
