"""Print the demo's tables."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from corecontext.demo.compare import DemoResult, formula_bytes
from corecontext.demo.figure import DEMO_ROWS
from corecontext.record import newest
from corecontext.terminal import console


def print_report(result: DemoResult) -> None:
    """Print the measured values side by side, and the answers of each method."""
    console().print(measured_table(result))
    console().print(answers_table(result))
    cache = newest(result.records, "demo.cache_bytes", method="cca")
    length, g, s = (cache.params[key] for key in ("length", "group_size", "window_size"))
    agrees = "equals" if formula_bytes(cache) == cache.value else "DIFFERS FROM"
    console().print(
        f"The cache {agrees} the formula: L // g + s + g - 1 = {length // g} + {s} + {g} - 1 "
        "entries a layer. Peak memory is the prefill's, on top of the loaded model."
    )
    console().print(
        "The model is tiny and trained to show the machinery: its prose is poor, and it answers "
        "only facts in the form that it was trained on. The numbers are this machine's."
    )


def measured_table(result: DemoResult) -> Table:
    """Make the table of full attention, CCA and their ratio."""
    cca = newest(result.records, "demo.cache_bytes", method="cca").params
    table = Table(
        title=f"{cca['length']} tokens, {cca['layers']} layers, g = {cca['group_size']}, s = "
        f"{cca['window_size']}, {cca['dtype']}\n{result.records[0].device}",
        box=SIMPLE_HEAD,
    )
    table.add_column("")
    for column in ("full attention", "CCA", ""):
        table.add_column(column, justify="right")
    count = len(result.questions)
    for label, name, shown, unit in DEMO_ROWS:
        full, cca_value = result.value(name, "full"), result.value(name, "cca")
        if name == "retrieval_accuracy":
            cells = [f"{round(share * count)} of {count}" for share in (full, cca_value)]
            table.add_row("answers right", *cells, "")
        else:
            cells = [shown.format(value / unit) for value in (full, cca_value)]
            table.add_row(label, *cells, _ratio(name, full, cca_value))
    return table


def answers_table(result: DemoResult) -> Table:
    """Make the table of each question, its right answer and the answer of each method."""
    table = Table(title="facts planted in the document, asked at its end", box=SIMPLE_HEAD)
    for column in ("depth", "tokens back", "question", "right", "full attention", "CCA"):
        table.add_column(column, overflow="fold")
    for i, question in enumerate(result.questions):
        fact = question.fact
        cells = []
        for method in ("full", "cca"):
            answer = result.answers[method][i]
            cells.append(Text(answer, style="green" if fact.is_correct(answer) else "red"))
        place = (f"{question.depth:.0%}", str(question.distance))
        table.add_row(*place, fact.question, fact.answer, *cells)
    return table


def _ratio(name: str, full: float, cca: float) -> str:
    """Format how much less CCA takes; for perplexity how much more."""
    if name == "perplexity":
        return f"{100 * (cca / full - 1):+.1f} %"
    less, more = ("faster", "slower") if name.endswith(("_s", "_ms")) else ("less", "more")
    return f"{full / cca:.1f}x {less}" if full >= cca else f"{cca / full:.1f}x {more}"
