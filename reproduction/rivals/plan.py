"""List the published cells of compressed contexts, the most important first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from corecontext.record import Record
from reproduction.published import command_of, options_of
from reproduction.real import plan as real_plan
from reproduction.real.plan import HEADS
from reproduction.real.tasks import LIST_TOKENS
from reproduction.rivals.compare import (
    COMPRESSIONS,
    PRESSED,
    answered_tasks,
    cells_of,
    of_first_device,
)
from reproduction.rivals.tasks import PASSAGES, Cell, Counts, Task
from reproduction.suites.ruler import SUBTASKS

# Estimated seconds on one H200.
START_SECONDS = 5.0
"""Make questions; a run's first row loads the model besides."""
QUESTION_SECONDS = 0.3
"""Read a context, compress it and answer."""
PRESS_SECONDS = 0.1
"""The same of a press, which shares the reading with others."""


@dataclass(frozen=True)
class Row:
    """Methods at some compressions, and the questions that they are asked. Settings have the names
    and defaults of their options in `python -m reproduction rivals`."""

    methods: tuple[str, ...]
    counts: Counts
    compressions: tuple[int, ...] = COMPRESSIONS
    """Those at which a window fits into a context of these questions."""
    trained: real_plan.Row | None = None
    """The training of the model; None is the model as it is."""
    first_tokens: int = 0
    full_heads: str | None = None
    index: str | None = None
    """Index of fetch in the records, where those of another are not this row's."""

    @property
    def trained_by(self) -> str | None:
        """The method that the model was trained under."""
        return self.trained.method if self.trained else None

    @property
    def trained_tokens(self) -> int:
        """The tokens of that training."""
        return self.trained.trained_tokens if self.trained else 0

    @property
    def trained_index(self) -> str | None:
        """The index of fetch in that training."""
        if self.trained is None or not self.trained.method.startswith("fetch"):
            return None
        return self.trained.sizes.fetch_index

    def command(self, model: str, cells: Sequence[Cell], options: Sequence[str] = ()) -> str:
        """Return the command that measures cells of this row alone.

        Args:
            model: The model's folder or name.
            options: Options of a trained model.
        """
        settings = {
            "methods": tuple(dict.fromkeys(cell.method for cell in cells)),
            "compressions": tuple(dict.fromkeys(cell.compression for cell in cells)),
            "first_tokens": self.first_tokens,
            "full_heads": self.full_heads,
        }
        defaults = {"methods": (), "compressions": (1,), "first_tokens": 0, "full_heads": None}
        counts = options_of(self.counts._asdict(), Counts()._asdict())
        if self.counts.ruler:
            counts += ["--full", "results/rivals.jsonl"]
        return command_of("rivals", model, [*options, *options_of(settings, defaults), *counts])

    def missing(self, records: Sequence[Record], model: str) -> list[Cell]:
        """Return the cells that lack a record of any task on the device of the table; of RULER's
        tasks, those that full attention's records say it answers."""
        measured = {
            (record.params["method"], record.params["compression"], _task_of(record))
            for record in of_first_device(records)
            if self._is_of(record, model)
        }
        tasks = self._tasks(records)
        return [
            cell
            for cell in cells_of(self.methods, self.compressions)
            if any((*cell, task) not in measured for task in tasks)
        ]

    def seconds(self, num_cells: int, *, is_trained: bool) -> float:
        """Estimate the time of so many cells.

        Args:
            is_trained: Whether the trained model is saved already.
        """
        counts = self.counts
        questions = counts.needles * len(counts.needle_lengths) + counts.lists + counts.passages
        questions += 2 * counts.ruler
        is_shared = self.methods[-1] in PRESSED and not self.first_tokens
        if self.first_tokens:
            questions = 1 + self.first_tokens
        each = PRESS_SECONDS if is_shared else QUESTION_SECONDS
        seconds = START_SECONDS + each * num_cells * questions
        if self.trained is None or is_trained:
            return seconds
        return seconds + self.trained.training_seconds()

    def _tasks(self, records: Sequence[Record]) -> list[Task]:
        counts = self.counts
        tasks = []
        if counts.needles:
            tasks += [Task("needles", length) for length in counts.needle_lengths]
        if counts.lists:
            tasks.append(Task("list", LIST_TOKENS))
        if counts.ruler:
            answered = answered_tasks(records, self.trained_tokens)
            tasks += [task for task in answered if task.name in SUBTASKS]
        if counts.passages:
            tasks.append(Task(PASSAGES, counts.documents))
        return tasks

    def _is_of(self, record: Record, model: str) -> bool:
        """Whether a record is of this row's model and measure."""
        wanted = {"model": model, "trained_by": self.trained_by, "seed": 0}
        wanted |= {"trained_tokens": self.trained_tokens, "trained_index": self.trained_index}
        if self.index is not None:
            wanted["index"] = self.index
        is_time = record.name == "real.first_token_s"
        params = record.params
        return is_time == bool(self.first_tokens) and all(
            params.get(name) == value for name, value in wanted.items()
        )


def _task_of(record: Record) -> Task:
    return Task(record.params["task"], record.params["length"])


NONE = Counts(needles=0, lists=0, ruler=0, passages=0)
SHORT_NEEDLES = NONE._replace(needles=25, needle_lengths=(4000,))
LONG_NEEDLES = NONE._replace(needles=25, needle_lengths=(7900,))
LISTS = NONE._replace(lists=10)
RULER = NONE._replace(ruler=20)
QUESTIONS = NONE._replace(passages=50)
TIME = NONE._replace(needles=1, needle_lengths=(7900,))
ALL = (SHORT_NEEDLES, LONG_NEEDLES, LISTS, RULER, QUESTIONS)


def _rows(method: str, fits: dict[Counts, tuple[int, ...]], **settings: Any) -> list[Row]:
    """Return a row of a cache of this package for each kind of question.

    Args:
        fits: Compressions at which a window fits, where not at all.
    """
    return [Row((method,), counts, fits.get(counts, COMPRESSIONS), **settings) for counts in ALL]


# The contexts of lists and passages have about 2,500 tokens.
FETCH_FITS = {LISTS: (4, 8), QUESTIONS: (4, 8)}
CORES_FIT = {QUESTIONS: (4, 8)}
RAW_HEADS_FIT = {SHORT_NEEDLES: (4, 8), LISTS: (4, 8), RULER: (4, 8), QUESTIONS: (4,)}
FETCH_RAW_HEADS_FIT = dict.fromkeys(ALL, (4,)) | {LONG_NEEDLES: (4, 8)}
WITH_HEADS = {"full_heads": HEADS}

ROWS = (
    # 1. Fetch on the model as it is.
    Row(("fetch",), LONG_NEEDLES, (8,), index="bits:2"),
    *_rows("fetch", FETCH_FITS),
    # 2. Seconds to the first token.
    Row(("full", "cca", "fetch"), TIME, first_tokens=7),
    Row(("cca_raw_heads",), TIME, first_tokens=7, **WITH_HEADS),
    Row(PRESSED, TIME, first_tokens=7),
    # 3. Fetch on the model that the default recipe adapts.
    *_rows("fetch", FETCH_FITS, trained=real_plan.FETCH_BITS),
    # 4. Presses on the model as it is, and on that trained under full attention.
    *(Row(PRESSED, counts) for counts in ALL),
    *(Row(PRESSED, counts, trained=real_plan.FULL) for counts in ALL),
    # 5. Heads that keep every token, and core tokens.
    *_rows("fetch_raw_heads", FETCH_RAW_HEADS_FIT, **WITH_HEADS),
    *_rows("cca_raw_heads", RAW_HEADS_FIT, **WITH_HEADS),
    *_rows("cca", CORES_FIT),
    *_rows("cca", CORES_FIT, trained=real_plan.CORES),
    *_rows("cca_raw_heads", RAW_HEADS_FIT, trained=real_plan.RAW_HEADS, **WITH_HEADS),
)
"""The cells of docs/real-model.md's tables of compressed contexts, but those of full attention,
which come first of all."""
