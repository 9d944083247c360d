"""The demo's tables."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from corecontext.demo.compare import DemoResult, formula_bytes
from corecontext.terminal import console

MIB = 2**20


def print_report(result: DemoResult) -> None:
    """Print what was measured, side by side, and what each method answered."""
    cca = next(r.params for r in result.records if r.params["method"] == "cca")
    console().print(measured_table(result))
    console().print(answers_table(result))
    held = next(
        r for r in result.records if r.name == "demo.cache_bytes" and r.params["method"] == "cca"
    )
    agrees = "equals" if formula_bytes(held) == held.value else "DIFFERS FROM"
    console().print(
        f"The cache {agrees} the formula: L // g + s + g - 1 = {cca['length'] // cca['group_size']} + "
        f"{cca['window_size']} + {cca['group_size']} - 1 entries a layer. Peak memory is what the prefill "
        "took on top of the loaded model."
    )
    console().print(
        "The model is tiny, trained to show the machinery: its prose is poor, and facts in another form "
        "than it was trained on are beyond it. The numbers are this machine's."
    )


def measured_table(result: DemoResult) -> Table:
    """Full attention, CCA and their ratio."""
    cca = next(r.params for r in result.records if r.params["method"] == "cca")
    table = Table(
        title=f"{cca['length']} tokens, {cca['layers']} layers, g = {cca['group_size']}, s = "
        f"{cca['window_size']}, {cca['dtype']}\n{result.records[0].device}",
        box=SIMPLE_HEAD,
    )
    for column, justify in (
        ("", "left"),
        ("full attention", "right"),
        ("CCA", "right"),
        ("", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for label, name, shown in (
        ("time to first token", "first_token_s", "{:.2f} s"),
        ("time per further token", "next_token_ms", "{:.1f} ms"),
        ("cache", "cache_bytes", "MiB"),
        ("peak memory of the prefill", "peak_bytes", "MiB"),
        ("perplexity", "perplexity", "{:.3f}"),
        ("answers right", "retrieval_accuracy", "of"),
    ):
        full, ours = result.value(name, "full"), result.value(name, "cca")
        if shown == "MiB":
            cells = [f"{x / MIB:.1f} MiB" for x in (full, ours)]
        elif shown == "of":
            count = len(result.questions)
            cells = [f"{round(x * count)} of {count}" for x in (full, ours)]
        else:
            cells = [shown.format(x) for x in (full, ours)]
        table.add_row(label, *cells, _ratio(name, full, ours))
    return table


def answers_table(result: DemoResult) -> Table:
    """Each question, the right answer and what each method said."""
    table = Table(title="facts planted in the document, asked at its end", box=SIMPLE_HEAD)
    for column in ("depth", "tokens back", "question", "right", "full attention", "CCA"):
        table.add_column(column, overflow="fold")
    for i, question in enumerate(result.questions):
        cells = []
        for method in ("full", "cca"):
            given = result.answers[method][i]
            cells.append(Text(given, style="green" if question.fact.is_correct(given) else "red"))
        table.add_row(
            f"{question.depth:.0%}",
            str(question.distance),
            question.fact.question,
            question.fact.answer,
            *cells,
        )
    return table


def _ratio(name: str, full: float, ours: float) -> str:
    """How much less CCA takes; for perplexity how much more."""
    if name == "retrieval_accuracy":
        return ""
    if name == "perplexity":
        return f"{100 * (ours / full - 1):+.1f} %"
    less, more = ("faster", "slower") if name.endswith(("_s", "_ms")) else ("less", "more")
    return f"{full / ours:.1f}x {less}" if full >= ours else f"{ours / full:.1f}x {more}"
