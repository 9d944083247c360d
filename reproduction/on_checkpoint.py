"""Run the paper's evaluations on a checkpoint: every method, every task with files, one report."""

import html
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tables import Column
from corecontext.eval.evaluate import ModelOptions, evaluate, of_task
from corecontext.eval.items import Settings
from corecontext.eval.runner import data_hashes
from corecontext.eval.summary import Row, shown_value, summarise, to_records
from corecontext.eval.task_table import Task
from corecontext.files import UserError, make_folder, write_text
from corecontext.loading import load_config
from corecontext.methods import PRESET, name_of
from corecontext.record import Record, append_records
from corecontext.terminal import console
from reproduction import paper
from reproduction.attentions.minference import MInference
from reproduction.html_page import DASH, Page, table
from reproduction.suites import ruler
from reproduction.suites.tasks import SUITES

METHODS = ("full", "cca", "streaming_llm", "lm_infinite", MInference())
WHERE = {
    "perplexity": "Tables 7 to 9",
    "multidoc_qa": "Table 3",
    "ruler": "Table 4",
    "mmlu": "Table 6",
    "longbench": "Tables 1, 2, 5, 10",
}
SECTION_OF = {
    "Table 1": "longbench",
    "Table 2": "longbench",
    "Table 3": "multidoc_qa",
    "Table 4": "ruler",
    "Table 5": "longbench",
    "Table 6": "mmlu",
    "Figure 3": "flexibility",
}
"""The section with the counterpart of a table or figure."""
GRID = tuple((g, s) for g in (2, 8, 16) for s in (1024, 4096))
"""Group and window sizes of Figure 3 at test time, for perplexity alone."""


def reproduce_checkpoint(
    model: str,
    data: str,
    folder: Path,
    *,
    settings: Settings | None = None,
    options: ModelOptions | None = None,
    json_path: str | None = None,
) -> Path:
    """Evaluate and write report.html; items.jsonl keeps every item, so that a second call resumes.

    Args:
        model: A folder in the Hugging Face format, or an identifier on the hub.
        data: Folder with the tasks' files (docs/evaluation.md); tasks without files are left out.
        settings: Lengths, numbers of documents and limits, for all tasks that have them.
        options: dtype and device.
        json_path: File that the numbers are appended to, too.

    Raises:
        UserError: no task has its files, or an error of `evaluate`.
    """
    tasks = [task for task in SUITES.values() if _has_files(task, data)]
    names = [task.name for task in tasks]
    if not tasks:
        raise UserError(
            f"data '{data}' must hold the files of a task (docs/evaluation.md), got none."
        )
    make_folder(folder)
    settings = settings or Settings()
    options = options or ModelOptions()
    if "ruler" in names and not of_task(settings, "ruler").subtasks:
        subtasks = (f"ruler:{subtask}" for subtask in ruler.available(data))
        settings = settings._replace(subtasks=(*settings.subtasks, *subtasks))
    results = str(folder / "items.jsonl")
    items: list[Record] = []
    rule = _paper_rule(model)
    for method in METHODS:
        console().print(f"{name_of(method)}: {', '.join(names)}")
        sized = options._replace(settings=rule) if method == "cca" else options
        items += evaluate(model, [method], tasks, [data], settings, sized, results)
    rows = summarise(items, SUITES)
    grid: list[Row] = []
    for g, s in GRID if "perplexity" in names else ():
        console().print(f"cca, g = {g}, s = {s}: perplexity")
        sized = options._replace(settings={"group_size": g, "window_size": s, **rule})
        of_grid = of_task(settings, "perplexity")
        perplexity = [SUITES["perplexity"]]
        grid += summarise(evaluate(model, ["cca"], perplexity, [data], of_grid, sized, results))
    records = to_records([*rows, *grid], items[0].device)
    if json_path is not None:
        append_records(json_path, records)
    out = folder / "report.html"
    write_text(out, _page(model, rows, grid, records))
    return out


def _paper_rule(model: str) -> dict[str, Any]:
    """Return the sizes that make CCA the paper's rule; none for a checkpoint with settings of its
    own."""
    if getattr(load_config(model), "cca", None):
        return {}
    return {PRESET: "paper"}


def _has_files(task: Task, data: str) -> bool:
    hashes = data_hashes(task, data)
    return len(hashes) > (1 if task.name == "longbench" else 0)


def _page(model: str, rows: Sequence[Row], grid: Sequence[Row], records: Sequence[Record]) -> str:
    """Return tables by task; each number links to its record."""
    page = Page(records)
    record_of = {id(row): record for row, record in zip([*rows, *grid], records)}

    def value(row: Row) -> str:
        return page.cell(record_of[id(row)], lambda _: shown_value(row))

    page.section(
        "what",
        "What this is",
        f"<p>The paper's evaluations on {html.escape(Path(model).name)}: no method was trained "
        "here, so rows other than the checkpoint's own attention are zero-shot. Scores compare "
        "methods under equal conditions, not with published ones.</p>",
    )
    for task in dict.fromkeys(row.task for row in rows):
        by_place = {
            (row.size, row.part, row.method): value(row) for row in rows if row.task == task
        }
        methods = dict.fromkeys(method for _, _, method in by_place)

        def score(method: str, place: tuple, by_place: dict = by_place) -> str:
            return by_place.get((*place, method), DASH)

        columns = [
            Column("size", lambda place: str(place[0] or "")),
            Column("part", lambda place: html.escape(place[1] or "all")),
            *(Column(method, partial(score, method)) for method in methods),
        ]
        places = dict.fromkeys((size, layers) for size, layers, _ in by_place)
        page.section(task, f"{task} ({WHERE[task]})", table(columns, places))
    if grid:
        columns = [
            Column("method", lambda row: html.escape(row.method)),
            Column("length", lambda row: str(row.size)),
            Column("perplexity", value),
        ]
        whole = [row for row in grid if not row.part]
        page.section("flexibility", "Other sizes at test time (Figure 3)", table(columns, whole))
    sections = {row.task for row in rows} | ({"flexibility"} if grid else set())
    page.section("paper", "Every row of the paper", _paper_rows(sections))
    return page.render(f"Core Context Aware attention on {Path(model).name}")


def _paper_rows(sections: set[str]) -> str:
    """Return every row of the paper with its counterpart, if this page has one."""

    def anchor(row: paper.Counterpart) -> str:
        section = SECTION_OF.get(row.where, "")
        return section if section in sections and row.here else ""

    def counterpart(row: paper.Counterpart) -> str:
        return f'<a href="#{anchor(row)}">{anchor(row)}</a>' if anchor(row) else "none"

    def note(row: paper.Counterpart) -> str:
        if anchor(row):
            return "this checkpoint"
        if not row.here:
            return row.why
        if row.where in SECTION_OF:
            return "No files of this task were given."
        return (
            "It needs training or a benchmark: see the miniature (`python -m reproduction` "
            "without --model) and docs/benchmarks.md."
        )

    columns = [
        Column("where", lambda row: row.where),
        Column("row", lambda row: html.escape(row.row)),
        Column("counterpart", counterpart),
        Column("note", note),
    ]
    return table(columns, paper.rows())
