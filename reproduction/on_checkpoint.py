"""The paper's evaluations on a checkpoint of the user's: every method, every task whose files are
there, one report."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from corecontext.eval.evaluate import ModelOptions, evaluate
from corecontext.eval.items import Settings
from corecontext.eval.runner import TASKS, data_hashes
from corecontext.eval.summary import Row, shown_value, summarise, to_records
from corecontext.files import UserError, make_folder, write_text
from corecontext.record import Record, append_records
from corecontext.terminal import console
from reproduction import paper
from reproduction.report import Page, table

METHODS = ("full", "cca", "streaming_llm", "lm_infinite", "minference")
WHERE = {
    "perplexity": "Tables 7 to 9",
    "multidoc_qa": "Table 3",
    "ruler": "Table 4",
    "mmlu": "Table 6",
    "longbench": "Tables 1, 2, 5, 10",
}
GRID = tuple((g, s) for g in (2, 8, 16) for s in (1024, 4096))
"""Sizes of Figure 3 at test time."""


def reproduce_checkpoint(
    model: str,
    data: str,
    folder: Path,
    *,
    settings: Settings | None = None,
    methods: Sequence[str] = METHODS,
    grid: Sequence[tuple[int, int]] = GRID,
    dtype: str = "auto",
    device: str = "auto",
    json_path: str | None = None,
) -> Path:
    """Evaluate and write report.html; every item is kept in items.jsonl, so that the same call goes
    on.

    Args:
        model: A folder in the Hugging Face format, or an identifier on the hub.
        data: Folder with the tasks' files (docs/evaluation.md); tasks without files are left out.
        settings: Lengths, numbers of documents and limits, for all tasks that have them.
        grid: (group_size, window_size) of CCA, for perplexity alone.
        json_path: File that the numbers are appended to, too.

    Raises:
        UserError: no task has its files, or what `evaluate` raises.
    """
    tasks = [
        task
        for task in TASKS
        if data_hashes(task, data) and (task != "longbench" or len(data_hashes(task, data)) > 1)
    ]
    if not tasks:
        raise UserError(
            f"data '{data}' must hold the files of a task (docs/evaluation.md), got none."
        )
    make_folder(folder)
    settings = settings or Settings()
    items, found = str(folder / "items.jsonl"), []
    options = ModelOptions(dtype=dtype, device=device)
    for method in methods:
        console().print(f"{method}: {', '.join(tasks)}")
        found += evaluate(model, [method], tasks, [data], settings, options, items)
    rows = summarise(found)
    grid_rows: list[Row] = []
    if "perplexity" in tasks:
        for g, s in grid:
            console().print(f"cca, g = {g}, s = {s}: perplexity")
            sizes = {"group_size": g, "window_size": s}
            grid_rows += summarise(
                evaluate(
                    model,
                    ["cca"],
                    ["perplexity"],
                    [data],
                    settings,
                    options._replace(sizes=sizes),
                    items,
                )
            )
    records = to_records([*rows, *grid_rows], found[0].device)
    if json_path is not None:
        append_records(json_path, records)
    out = folder / "report.html"
    write_text(out, _page(model, rows, grid_rows, records))
    return out


def _page(model: str, rows: Sequence[Row], grid: Sequence[Row], records: Sequence[Record]) -> str:
    """Tables by task; each number links to its record."""
    page = Page(records)
    record_of = {id(row): record for row, record in zip([*rows, *grid], records)}
    page.section(
        "what",
        "What this is",
        f"<p>The paper's evaluations on {html.escape(Path(model).name)}: no method "
        "was trained here, so rows other than the checkpoint's own attention are zero-shot. Scores compare "
        "methods under equal conditions, not with published ones.</p>",
    )
    for task in dict.fromkeys(row.task for row in rows):
        here = [row for row in rows if row.task == task]
        names = list(dict.fromkeys(row.method for row in here))
        lines = []
        for size, part in dict.fromkeys((row.size, row.part) for row in here):
            cells = []
            for name in names:
                row = next(
                    (row for row in here if (row.size, row.part, row.method) == (size, part, name)),
                    None,
                )
                cells.append(
                    "&ndash;"
                    if row is None
                    else page.cell(record_of[id(row)], lambda _, one=row: shown_value(one))
                )
            lines.append([str(size or ""), html.escape(part or "all"), *cells])
        page.section(task, f"{task} ({WHERE[task]})", table(["size", "part", *names], lines))
    if grid:
        page.section(
            "flexibility",
            "Other sizes at test time (Figure 3)",
            table(
                ["method", "length", "perplexity"],
                [
                    [
                        html.escape(row.method),
                        str(row.size),
                        page.cell(record_of[id(row)], lambda _, one=row: shown_value(one)),
                    ]
                    for row in grid
                    if not row.part
                ],
            ),
        )
    wanted = {
        where: task
        for task, where in (
            ("multidoc_qa", "Table 3"),
            ("ruler", "Table 4"),
            ("mmlu", "Table 6"),
            ("longbench", "Table 1"),
            ("longbench", "Table 2"),
            ("longbench", "Table 5"),
            ("flexibility", "Figure 3"),
        )
    }
    have = {row.task for row in rows} | ({"flexibility"} if grid else set())
    lines = []
    for one in paper.rows():
        anchor = wanted.get(one.where)
        if anchor in have and one.here:
            lines.append(
                [
                    one.where,
                    html.escape(one.row),
                    f'<a href="#{anchor}">{anchor}</a>',
                    "this checkpoint",
                ]
            )
        else:
            why = (
                one.why
                if not one.here
                else "No files of this task were given."
                if anchor
                else "It needs training or a benchmark: see the miniature (`python -m reproduction` without --model) and "
                "docs/benchmarks.md."
            )
            lines.append([one.where, html.escape(one.row), "none", why])
    page.section(
        "paper", "Every row of the paper", table(["where", "row", "counterpart", "note"], lines)
    )
    return page.render(f"Core Context Aware attention on {Path(model).name}")
