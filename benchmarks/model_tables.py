"""Write the tables of whole models from their records."""

from collections.abc import Callable, Sequence

from benchmarks.model_report import (
    NAMES,
    Comparison,
    by_model,
    comparisons,
    label_of,
    labels,
    main_comparisons,
    skipped,
)
from benchmarks.tables import (
    Column,
    markdown,
    optional,
    shown_bytes,
    shown_ms,
    shown_times,
)
from corecontext.record import Record

FORMATS: dict[str, Callable[[float], str]] = {
    "model.first_token_s": lambda value: shown_ms(1e3 * value),
    "model.next_token_ms": shown_ms,
    "model.cache_bytes": shown_bytes,
    "model.peak_bytes": shown_bytes,
    "model.tokens_per_s": "{:.4g}".format,
}
GAINS = dict.fromkeys(NAMES, "full / CCA") | {"model.tokens_per_s": "CCA / full"}


def title(measured: Sequence[Comparison]) -> str:
    """Return the title of a model's tables, which tells random weights from a checkpoint's."""
    p = measured[0].params
    config = f"g = {p['group_size']}, s = {p['window_size']}, "
    if len({comparison.config for comparison in measured}) > 1:
        config = ""
    return f"{p['shape']} ({p['weights']} weights), {p['dtype']}, {config}{measured[0].device}"


def columns(name: str, measured: Sequence[Comparison], length: str = "length") -> list[Column]:
    """Return a column for each method; g and s where there are several, gains and floors."""
    show = optional(FORMATS[name], "-")
    made = [Column(length, lambda comparison: str(comparison.length))]
    if len({comparison.config for comparison in measured}) > 1:
        made.append(Column("g", lambda comparison: str(comparison.config[0])))
        made.append(Column("s", lambda comparison: str(comparison.config[1])))
    made += [_method_column(name, label) for label in labels(measured, name)]
    if any(comparison.gain(name) for comparison in measured):
        gain = optional(shown_times, "-")
        made.append(Column(GAINS[name], lambda comparison: gain(comparison.gain(name))))
    for method, text in (("full", "full"), ("cca", "CCA")):
        if any((name, method) in comparison.floors for comparison in measured):
            made.append(
                Column(
                    f"least: {text}",
                    lambda comparison, method=method: show(comparison.floors.get((name, method))),  # type: ignore[misc]
                )
            )
    return made


def _method_column(name: str, label: str) -> Column:
    show = optional(FORMATS[name], "-")

    def cell(comparison: Comparison) -> str:
        text = show(comparison.value(name, label))
        record = comparison.values[name].get(label)
        if name == "model.tokens_per_s" and record is not None:
            text += f" (batch {record.params['batch']})"
        return text

    return Column(label, cell)


def _with_values(name: str, measured: Sequence[Comparison]) -> list[Comparison]:
    return [comparison for comparison in measured if comparison.values.get(name)]


def model_markdown(records: Sequence[Record], *, every_size: bool = False) -> str:
    """Return the tables of whole models, at each model's main g and s or at all of them; without
    CCA to compare with, a line for each value."""
    compared = comparisons(records)
    lines: list[str] = []
    for measured in by_model(compared if every_size else main_comparisons(compared)).values():
        lines += ["", f"**{title(measured)}**"]
        for name in NAMES:
            rows = _with_values(name, measured)
            if rows:
                lines += ["", *markdown(columns(name, measured, f"{NAMES[name]}: L"), rows)]
    notes = skipped(records)
    if not compared:
        notes += [
            f"{label_of(r.params)}, L = {r.params['length']}, batch {r.params['batch']}: "
            f"{NAMES[r.name]} {FORMATS[r.name](r.value)}"
            for r in records
            if r.name in NAMES and r.params["method"] != "floor"
        ]
    if notes:
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines[1:]) + "\n"
