"""Show what the demo measured: tables on the terminal, and a table in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from corecontext.demo.compare import DemoResult, title_of
from corecontext.record import Record, newest
from corecontext.terminal import console

DEMO_ROWS = (
    ("time to first token", "first_token_s", "{:.2f} s", 1),
    ("time per further token", "next_token_ms", "{:.1f} ms", 1),
    ("cache", "cache_bytes", "{:.1f} MiB", 2**20),
    ("cache in host memory", "host_bytes", "{:.1f} MiB", 2**20),
    ("peak memory of the prefill", "peak_bytes", "{:.1f} MiB", 2**20),
    ("perplexity", "perplexity", "{:.3f}", 1),
    ("planted facts found", "retrieval_accuracy", "{:.0%}", 1),
)
"""Label, name of the record, format and unit of each quantity."""
WITHOUT_RATIO = ("host_bytes", "retrieval_accuracy")
"""Quantities that are not compared with full attention's."""
OURS = 2
"""Place of CCA among the methods, behind full attention and the window."""


def print_report(result: DemoResult) -> None:
    """Print the measured values side by side, and the answers of each method."""
    console().print(measured_table(result.records))
    console().print(answers_table(result))
    note = (
        "The model is tiny and trained to show the machinery: its prose is poor, and it answers "
        "only facts in the form that it was trained on."
    )
    if len(result.questions) and not result.questions[0].token_ids:  # another model's prompts
        note = (
            "Perplexity is that of the prompts' second halves. With fetch, full attention reads "
            "prompts while that takes less time. The model runs as it is; "
            "`corecontext train` adapts it."
        )
    console().print(
        f"{note} Peak memory is that of reading a prompt, on top of the loaded model. The numbers "
        "are this machine's."
    )


def measured_table(records: Sequence[Record]) -> Table:
    """Make the table of quantities: a column for each method, and one that compares CCA with full
    attention."""
    titles = _titles(records)
    table = Table(title=_caption(records), box=SIMPLE_HEAD)
    table.add_column("")
    for column in (*titles, f"{titles[OURS]} to full"):
        table.add_column(column, justify="right")
    for label, name, shown, unit in _rows(records):
        values = _values(records, name)
        ratio = "" if name in WITHOUT_RATIO else _ratio(name, values[0], values[OURS])
        table.add_row(label, *[shown.format(value / unit) for value in values], ratio)
    return table


def answers_table(result: DemoResult) -> Table:
    """Make the table of questions: the right answer and that of each method."""
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
    """Return the table of quantities in Markdown, for a page of docs/."""
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
    """Describe the machine, the prompts and the sizes of each method."""
    params = {record.params["method"]: record.params for record in records}
    full = params["full"]
    descriptions = [f"{records[0].device}: {full['length']} tokens, {full['dtype']}"]
    for method, sizes in params.items():
        if method == "adapted":
            descriptions.append("adapted: with this package's adapter")
        elif method != "full":
            descriptions.append(f"{title_of(method)}: {_sizes(sizes)}")
    return "; ".join(descriptions)


def _sizes(params: Mapping[str, Any]) -> str:
    """Describe the attention by a record's params."""
    text = f"s = {params['window_size']}"
    if "fetch_groups" in params:
        groups = f"{params['fetch_groups']} groups of {params['group_size']}"
        return f"{groups} by `{params['fetch_index']}`, {text}"
    return f"g = {params['group_size']}, {text}" if "group_size" in params else text


def _rows(records: Sequence[Record]) -> list[tuple[str, str, str, int]]:
    """Return those of `DEMO_ROWS` that were recorded."""
    names = {record.name for record in records}
    return [row for row in DEMO_ROWS if f"demo.{row[1]}" in names]


def _ratio(name: str, full: float, ours: float) -> str:
    """Format how much less or more CCA takes, for perplexity in percent; "" where nothing was
    measurable, as the memory of a short prefill."""
    if name == "perplexity":
        return f"{100 * (ours / full - 1):+.1f} %"
    if not full or not ours:
        return ""
    less, more = ("faster", "slower") if name.endswith(("_s", "_ms")) else ("less", "more")
    if full >= ours:
        return f"{full / ours:.1f}x {less}"
    return f"{ours / full:.1f}x {more}"


def _titles(records: Sequence[Record]) -> list[str]:
    """Return the titles of the methods in the order of the records."""
    return [title_of(method) for method in dict.fromkeys(r.params["method"] for r in records)]


def _values(records: Sequence[Record], name: str) -> list[float]:
    """Return a quantity of each method, full attention first."""
    methods = dict.fromkeys(record.params["method"] for record in records)
    return [newest(records, f"demo.{name}", method=method).value for method in methods]
