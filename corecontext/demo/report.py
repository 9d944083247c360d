"""Show what the demo measured: tables on the terminal, and a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from corecontext.config import CCAConfig
from corecontext.demo.compare import TITLES, DemoResult
from corecontext.record import Record, newest
from corecontext.terminal import console
from corecontext.visibility import num_sinks

DEMO_ROWS = (
    ("time to first token", "first_token_s", "{:.2f} s", 1),
    ("time per further token", "next_token_ms", "{:.1f} ms", 1),
    ("cache", "cache_bytes", "{:.1f} MiB", 2**20),
    ("cache in host memory", "host_bytes", "{:.1f} MiB", 2**20),
    ("peak memory of the prefill", "peak_bytes", "{:.1f} MiB", 2**20),
    ("perplexity", "perplexity", "{:.3f}", 1),
    ("planted facts found", "retrieval_accuracy", "{:.0%}", 1),
)
"""Label, record, format and unit of each quantity."""
WITHOUT_RATIO = ("host_bytes", "retrieval_accuracy")


def print_report(result: DemoResult) -> None:
    """Print the measured values side by side, and the answers of each method."""
    console().print(measured_table(result.records))
    console().print(answers_table(result))
    console().print(_formula(result))
    note = (
        "The model is tiny and trained to show the machinery: its prose is poor, and it answers "
        "only facts in the form that it was trained on."
    )
    if "fetch" in result.answers:
        note = (
            "Perplexity is that of the prompts' second halves. Fetch sees the raw tokens of each "
            f"query's best {CCAConfig.fetch_groups} groups of {CCAConfig.group_size} "
            f"and has a window of {CCAConfig.window_size}. The model runs as it is; "
            f"`corecontext train` adapts it, and '{TITLES['adapted']}' is with this package's "
            "adapter."
        )
    console().print(f"{note} The numbers are this machine's.")


def measured_table(records: Sequence[Record]) -> Table:
    """Make the table of each method, and the ratio of full attention to CCA."""
    table = Table(title=_caption(records), box=SIMPLE_HEAD)
    table.add_column("")
    for column in (*_titles(records), "CCA to full"):
        table.add_column(column, justify="right")
    for label, name, shown, unit in _rows(records):
        values = _values(records, name)
        ratio = "" if name in WITHOUT_RATIO else _ratio(name, *values[:2])
        table.add_row(label, *[shown.format(value / unit) for value in values], ratio)
    return table


def answers_table(result: DemoResult) -> Table:
    """Make the table of each question, its right answer and the answer of each method."""
    table = Table(title="facts planted in the document, and asked for", box=SIMPLE_HEAD)
    for column in ("depth", "tokens back", "question", "right", *_titles(result.records)):
        table.add_column(column, overflow="fold")
    for question, *answers in zip(result.questions, *result.answers.values()):
        fact = question.fact
        cells = [Text(text, "green" if question.is_correct(text) else "red") for text in answers]
        place = (f"{question.depth:.0%}", str(question.distance))
        table.add_row(*place, fact.question, fact.answer, *cells)
    return table


def demo_table(records: Sequence[Record]) -> str:
    """Return a page's table of the demo, in Markdown."""
    command = records[-1].command.partition(" --json")[0]
    titles = _titles(records)
    lines = [
        f"`{command}` on {_caption(records)}.",
        "",
        "| | " + " | ".join(titles) + " |",
        "|---|" + "---:|" * len(titles),
    ]
    for label, name, shown, unit in _rows(records):
        cells = [shown.format(value / unit) for value in _values(records, name)]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _caption(records: Sequence[Record]) -> str:
    """Describe the machine, the prompts and the sizes of CCA and fetch."""
    params = {record.params["method"]: record.params for record in records}
    cca = params["cca"]
    text = (
        f"{records[0].device}: {cca['length']} tokens, {cca['dtype']}, "
        f"g = {cca['group_size']}, s = {cca['window_size']}"
    )
    if "fetch" in params:
        fetch = params["fetch"]
        text += (
            f"; fetch: {fetch['fetch_groups']} groups of {fetch['group_size']} by "
            f"`{fetch['fetch_index']}`, s = {fetch['window_size']}"
        )
    if "adapted" in params:
        text += "; adapted: with this package's adapter"
    return text


def _formula(result: DemoResult) -> str:
    """Say whether CCA's cache has the size of the formula."""
    params = newest(result.records, "demo.cache_bytes", method="cca").params
    length, g, s = (params[key] for key in ("length", "group_size", "window_size"))
    sinks = num_sinks(params.get("sinks", 0), g)
    formula = f"L // g + s + g - 1 = {length // g} + {s} + {g} - 1"
    if sinks:
        groups = (length - sinks) // g
        formula = f"(L - n) // g + n + s + g - 1 = {groups} + {sinks} + {s} + {g} - 1"
    agrees = set(result.compact_bytes) == {result.formula_bytes}
    mass = ", each with a mass," if params.get("core_mass") else ""
    return (
        f"The cache {'equals' if agrees else 'DIFFERS FROM'} the formula: {formula} entries{mass} "
        f"in each of {len(result.compact_bytes)} layers. Peak memory is the prefill's, on top of "
        "the loaded model."
    )


def _rows(records: Sequence[Record]) -> list[tuple[str, str, str, int]]:
    """Return the rows of the quantities that were recorded."""
    names = {record.name for record in records}
    return [row for row in DEMO_ROWS if f"demo.{row[1]}" in names]


def _ratio(name: str, full: float, cca: float) -> str:
    """Format how much less CCA takes, for perplexity how much more; "" where one took nothing that
    can be measured, as the memory of a short prefill."""
    if name == "perplexity":
        return f"{100 * (cca / full - 1):+.1f} %"
    if not full or not cca:
        return ""
    less, more = ("faster", "slower") if name.endswith(("_s", "_ms")) else ("less", "more")
    if full >= cca:
        return f"{full / cca:.1f}x {less}"
    return f"{cca / full:.1f}x {more}"


def _titles(records: Sequence[Record]) -> list[str]:
    """Return the names of the methods in the order of the records."""
    return [TITLES[method] for method in dict.fromkeys(r.params["method"] for r in records)]


def _values(records: Sequence[Record], name: str) -> list[float]:
    """Return a quantity of each method; full attention and CCA are the first two."""
    methods = dict.fromkeys(record.params["method"] for record in records)
    return [newest(records, f"demo.{name}", method=method).value for method in methods]
