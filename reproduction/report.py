"""Write the report of a reproduction: tables, figures, the paper's rows, and all records."""

import html
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import Column
from corecontext.files import atomic_path, write_text
from corecontext.record import Record
from reproduction import plots
from reproduction.counted import about, cache_of_shapes, paper_rows
from reproduction.gains import gains
from reproduction.html_page import (
    Page,
    image,
    mebibytes,
    milliseconds,
    percent,
    table,
)
from reproduction.methods import SCRATCH, SCRATCH_FINE, Method, alike, methods
from reproduction.plan import from_scratch, later_seed, layers_of, tuned
from reproduction.quality_tables import brief_markdown
from reproduction.sizes import Size

STRATEGIES = (
    ("none", "cca_zero"),
    ("LoRA", "lora"),
    ("W_Q, W_K, W_V alone", "partial"),
    ("all parameters", "cca"),
    ("all parameters, a quarter of the rate", "gentle"),
    ("all parameters, four times the steps", "long"),
    ("all parameters, distilled from the model", "distilled"),
    ("one KV head keeps every token; all parameters", "raw_1"),
    ("the same, distilled", "raw_1_distilled"),
    ("the same, a quarter of the rate", "raw_1_distilled_gentle"),
    ("the same, four times the steps", "raw_1_distilled_long"),
    ("the same, LoRA", "raw_1_distilled_LoRA"),
    ("for comparison: full attention", "full"),
    ("the same, four times the steps", "full_long"),
    ("DuoAttention, distilled", "duo_1_distilled"),
    ("the same, four times the steps", "duo_1_distilled_long"),
    ("window alone", "window"),
)
"""Title and method of each training strategy."""
CLOZE = (
    ("full attention", "full", None),
    ("CCA, 16 groups", "cca", 16),
    ("CCA, 64 groups", "cca", 64),
)
QUESTIONS = {
    "multidoc_qa": "Questions of people (NaturalQuestions) about one of the passages. A model this "
    "small answers few, whatever its attention.",
    "multidoc_planted": "The same kind of passages, each with a planted fact at its end, one of "
    "which is asked for.",
}


def write_report(folder: Path, records: Sequence[Record], size: Size) -> Path:
    """Write report.html and its figures into the folder; sections without records say so.

    A brief size has a table in report.md instead.
    """
    derived = gains(folder, records, size)
    with atomic_path(folder / "derived.jsonl") as name:
        text = "".join(record.to_json() + "\n" for record in derived)
        Path(name).write_text(text, encoding="utf-8")
    if size.is_brief:
        out = folder / "report.md"
        write_text(out, brief_markdown(records, size))
        return out
    page = Page([*records, *derived])
    figures = plots.draw_all(folder, page.records, size)
    _Report(page, size, methods(size), figures).write()
    out = folder / "report.html"
    write_text(out, page.render("Core Context Aware attention: the paper in miniature"))
    return out


class _Report(NamedTuple):
    """The sections of the page."""

    page: Page
    size: Size
    methods: dict[str, Method]
    figures: dict[str, Path]

    def write(self) -> None:
        """Add all sections."""
        section = self.page.section
        figure = self.figure
        text = f"<p>{about(self.size)}</p>"
        section("what", "What this is", text)
        title = "Methods, adapted from one model with equal batches, steps and rate"
        section("methods", title, self.all_methods(), figure("methods", "gain kept by method"))
        section("layers", "Which layers and KV heads need small groups", *self.layers())
        section("pooling", "Pooling (Table 7)", self.pooling())
        title = "Group and window size, each tuned (Tables 8 and 9)"
        text = "perplexity by group and window size"
        section("sizes", title, self.sizes(), figure("sizes", text))
        section("strategies", "What is trained (Table 10, paper 3.5)", self.strategies())
        title = "From scratch, equal tokens in equal order, each with the best of its rates"
        text = "held-out perplexity by tokens trained on"
        section("scratch", title, self.scratch(), figure("scratch", text))
        title = "Facts asked for at the end of a text (for Table 4)"
        section("retrieval", title, self.retrieval())
        section("questions", "Multi-document questions (Table 3)", *self.questions())
        title = "Four-way choice with a constant number of groups (for Table 6)"
        section("cloze", title, self.cloze())
        section(
            "flexibility",
            "Other sizes at test time, same weights (Figure 3)",
            f"<p>Adapted at g = {self.size.group}, s = {self.size.window}:</p>",
            self.grid("flexibility"),
            figure("flexibility", "perplexity against time for other g and s"),
            "<p>A base model, not adapted:</p>",
            self.grid("flexibility-base"),
        )
        section("curves", "Training curves (Figure 6)", figure("curves", "loss by step"))
        title = "Attention is sparse (Figures 1 and 5)"
        section("maps", title, figure("maps", "attention maps"), self.maps())
        title = "Cache of the paper's shapes (Figure 4, right)"
        section("cost", title, cache_of_shapes(), figure("cost", "cache by length"))
        section("paper", "Every row of the paper", paper_rows())

    def figure(self, name: str, text: str) -> str:
        """Return a figure, or a note that it is missing."""
        return image(self.figures.get(name), text)

    def cost(self, name: str, method: Method) -> Record | None:
        """Return the cost of a method's attention, whichever method it was measured under."""
        costs = (
            self.page.find(name, of="methods", method=same) for same in alike(self.methods, method)
        )
        return next((record for record in costs if record is not None), None)

    # Columns

    def mean(self, name: str, method: str, **params: Any) -> str:
        """Return the mean over the seeds."""
        return self.page.mean(self.page.find_all(name, method, self.size.seeds, **params))

    def far(self, method: str) -> str:
        """Return the perplexity of the second half of windows."""
        return self.mean("quality.perplexity", method, bucket="far")

    def gain(self, method: str) -> str:
        """Return the share of the gain kept."""
        return self.mean("quality.gain_kept", method)

    def beyond(self, method: str) -> str:
        """Return the answers right beyond the window."""
        return self.mean("quality.accuracy", method, distance="far", length=self.size.length)

    # Sections

    def all_methods(self) -> str:
        """Return quality and cost of every method."""

        def seeds(method: Method) -> str:
            records = self.page.find_all(
                "quality.perplexity", method.name, self.size.seeds, bucket="far"
            )
            return ", ".join(str(record.params["seed"]) for record in records)

        def gain(method: Method) -> str:
            records = self.page.find_all("quality.gain_kept", method.name, self.size.seeds)
            text = self.page.mean(records)
            if records and "low" in records[0].params:
                p = records[0].params
                text += f"<br>[{percent(p['low'])}, {percent(p['high'])}]"
            return text

        def cost(name: str, show: Any, method: Method) -> str:
            return self.page.cell(self.cost(name, method), show)

        columns = [
            _TITLE,
            Column("seeds", seeds),
            Column("perplexity, far", lambda method: self.far(method.name)),
            Column("gain kept [95 %, its first seed]", gain),
            Column("retrieval beyond the window", lambda method: self.beyond(method.name)),
            Column("cache, MiB", partial(cost, "model.cache_bytes", mebibytes)),
            Column("prompt, ms", partial(cost, "model.first_token_s", milliseconds)),
        ]
        return table(columns, self.methods.values())

    def layers(self) -> Iterator[str]:
        """Yield the trials of each base model, in columns of the units chosen before."""
        yield (
            "<p>Validation perplexity, far, of a base model not adapted, where one layer, or one "
            "KV head (layer.head), keeps every token and the rest has groups four times as "
            "large.</p>"
        )
        for seed in dict.fromkeys(self.size.bases):
            stage = layers_of(self.size, seed)
            trials = [r for r in self.page.records if r.params.get("stage") == stage]
            for kind, is_head in (("layer", False), ("KV head", True)):
                yield self._trials(
                    f"{kind}, seed {seed}",
                    [trial for trial in trials if ("." in trial.params["unit"]) == is_head],
                )

    def _trials(self, title: str, trials: Sequence[Record]) -> str:
        rounds = dict.fromkeys(tuple(trial.params["beside"]) for trial in trials)
        by_place = {
            (trial.params["unit"], tuple(trial.params["beside"])): trial for trial in trials
        }
        columns = [Column(title, str)]
        for before in rounds:
            text = f"beside {', '.join(before)}" if before else "alone"
            columns.append(
                Column(
                    text,
                    lambda unit, before=before: self.page.cell(by_place.get((unit, before))),  # type: ignore[misc]
                )
            )
        return table(columns, dict.fromkeys(trial.params["unit"] for trial in trials))

    def pooling(self) -> str:
        """Return quality by pooling rule."""
        columns = [
            Column("pooling", lambda method: html.escape(method.title)),
            Column("perplexity, far", lambda method: self.far(method.name)),
            Column(
                "perplexity",
                lambda method: self.mean("quality.perplexity", method.name, bucket="all"),
            ),
            Column("gain kept", lambda method: self.gain(method.name)),
        ]
        return table(columns, [self.methods[m] for m in ("mean", "max", "cca")])

    def sizes(self) -> str:
        """Return quality and cost by g and by s."""
        page = self.page
        size = self.size

        def stage(row: tuple[str, int]) -> str:
            return f"{row[0]}{row[1]}-{later_seed(size)}"

        def perplexity(bucket: str, row: tuple[str, int]) -> str:
            return page.cell(page.find("quality.perplexity", stage=stage(row), bucket=bucket))

        def cost(name: str, show: Any, row: tuple[str, int]) -> str:
            params = {"group_size": size.group, "window_size": size.window}
            params["group_size" if row[0] == "g" else "window_size"] = row[1]
            return page.cell(page.find(name, of="sizes", **params), show)

        columns = [
            Column("size", lambda row: f"{row[0]} = {row[1]}"),
            Column("perplexity", partial(perplexity, "all")),
            Column("perplexity, far", partial(perplexity, "far")),
            Column("prompt, ms", partial(cost, "model.first_token_s", milliseconds)),
            Column("cache, MiB", partial(cost, "model.cache_bytes", mebibytes)),
        ]
        rows = [("g", g) for g in size.groups] + [("s", s) for s in size.windows]
        return table(columns, rows)

    def strategies(self) -> str:
        """Return quality by the parameters that are trained."""
        columns = [
            Column("strategy", lambda row: html.escape(row[0])),
            Column("perplexity, far", lambda row: self.far(row[1])),
            Column("gain kept", lambda row: self.gain(row[1])),
            Column("retrieval beyond the window", lambda row: self.beyond(row[1])),
        ]
        return table(columns, STRATEGIES)

    def scratch(self) -> str:
        """Return quality of models trained from random weights, and the rates tried."""
        page = self.page
        size = self.size

        def value(name: str, row: tuple[str, int], **params: Any) -> str:
            return page.cell(page.find(name, stage=from_scratch(*row), **params))

        def far(row: tuple[str, int]) -> Record | None:
            return page.find("quality.perplexity", stage=from_scratch(*row), bucket="far")

        def rate(row: tuple[str, int]) -> str:
            record = far(row)
            assert record is not None
            return f"{record.params['lr']:g}"

        beyond = {"distance": "far", "length": size.length}
        columns = [
            Column("method", lambda row: row[0]),
            Column("seed", lambda row: str(row[1])),
            Column("rate", rate),
            Column(
                "perplexity, far, validation",
                lambda row: value("quality.perplexity", row, bucket="far", split="val"),
            ),
            Column("test", lambda row: page.cell(far(row))),
            Column("gain kept", lambda row: value("quality.gain_kept", row)),
            Column(
                "retrieval beyond the window",
                lambda row: value("quality.accuracy", row, **beyond),
            ),
        ]
        seeds = list(dict.fromkeys(size.bases))
        rows = [(name, seed) for name in (*SCRATCH, *SCRATCH_FINE) for seed in seeds]
        tokens = size.step_tokens * sum(steps for _, steps in size.levels)
        return (
            f"<p>{tokens / 1e6:.0f} million tokens each.</p>"
            + table(columns, [row for row in rows if far(row) is not None])
            + f"<p>Validation perplexity of short trainings, by rate:</p>{self._rates()}"
        )

    def _rates(self) -> str:
        def perplexity(rate: float, name: str) -> str:
            where = {"stage": tuned(name, rate), "bucket": "all", "split": "val"}
            return self.page.cell(self.page.find("quality.perplexity", **where))

        rates = [Column(f"rate {rate:g}", partial(perplexity, rate)) for rate in self.size.rates]
        return table([Column("method", str), *rates], SCRATCH)

    def retrieval(self) -> str:
        """Return answers about planted facts, by length."""

        def right(length: int, method: Method) -> str:
            return self.mean("quality.accuracy", method.name, distance="all", length=length)

        lengths = [
            Column(f"{length} tokens", partial(right, length)) for length, _ in self.size.levels
        ]
        beyond = Column("beyond the window only", lambda method: self.beyond(method.name))
        return table([_TITLE, *lengths, beyond], self.methods.values())

    def questions(self) -> Iterator[str]:
        """Yield answers about passages, by their number."""

        def right(task: str, documents: int, method: Method) -> str:
            return self.mean("quality.accuracy", method.name, task=task, documents=documents)

        for task, text in QUESTIONS.items():
            yield f"<p>{text} Right where greedy decoding gives the first gold answer.</p>"
            passages = [
                Column(f"{count} passages", partial(right, task, count))
                for count in self.size.documents
            ]
            yield table([_TITLE, *passages], self.methods.values())

    def cloze(self) -> str:
        """Return the share of right choices."""

        def right(row: tuple[str, str, int | None]) -> str:
            groups = {} if row[2] is None else {"num_groups": row[2]}
            where = {"stage": "cloze", "method": row[1], **groups}
            return self.page.cell(self.page.find("quality.accuracy", **where))

        return table([Column("method", lambda row: row[0]), Column("right", right)], CLOZE)

    def grid(self, stage: str) -> str:
        """Return the perplexity of one set of weights by g and s."""

        def perplexity(s: int, g: int) -> str:
            where = {"bucket": "far", "group_size": g, "window_size": s}
            return self.page.cell(self.page.find("quality.perplexity", stage=stage, **where))

        windows = [Column(f"s = {s}", partial(perplexity, s)) for s in self.size.windows]
        groups = Column("perplexity, far", lambda g: f"g = {g}")
        return table([groups, *windows], self.size.groups)

    def maps(self) -> str:
        """Return the weight on the most attended keys, by layer."""
        text = "weight on the tenth of the keys that has most of it"
        columns = [
            Column("layer", lambda record: str(record.params["layer"])),
            Column(text, lambda record: self.page.cell(record)),
        ]
        return table(columns, [r for r in self.page.records if r.params.get("stage") == "maps"])


_TITLE = Column("method", lambda method: html.escape(method.title))
