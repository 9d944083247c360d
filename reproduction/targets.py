"""Judge the project's own targets: what the best rule must reach, and against which rivals."""

import html
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.head_budget import MORE_ENTRIES
from benchmarks.tables import Column
from corecontext.record import Record
from reproduction.html_page import DASH, Page, format_of, percent, table
from reproduction.methods import DUO, PAPER_RIVALS, Method, alike, methods
from reproduction.sizes import Size

RIVALS = (("any of the paper's rivals, or a window,", PAPER_RIVALS), ("DuoAttention", DUO))


class Verdict(NamedTuple):
    """A target, its measurement, and whether it is met."""

    target: str
    measured: str
    verdict: str


class Contest(NamedTuple):
    """A quantity in which a rule is compared with its rivals."""

    text: str
    name: str
    sign: int
    """1 where more is better, -1 where less is."""
    params: dict[str, Any]


def targets(page: Page, size: Size) -> str:
    """Return the table of targets; means over the seeds."""
    columns = [
        Column("target", lambda line: html.escape(line.target)),
        Column("measured", lambda line: line.measured),
        Column("", lambda line: line.verdict),
    ]
    return table(columns, _Judge(page, size, methods(size)).verdicts())


def cost_of(
    page: Page, name: str, known_methods: dict[str, Method], method: Method
) -> Record | None:
    """Return the cost of a method's attention, whichever method it was measured under."""
    for same in alike(known_methods, method):
        record = page.find(name, of="methods", method=same)
        if record is not None:
            return record
    return None


@dataclass
class _Judge:
    page: Page
    size: Size
    methods: dict[str, Method]

    def verdicts(self) -> Iterator[Verdict]:
        """Yield all targets."""
        page = self.page
        size = self.size
        where: dict[str, Any] = {"distance": "all", "length": size.length}
        full = page.find_all("quality.accuracy", "full", size.seeds, **where)
        text = "full attention answers at least 90 % at the trained length"
        worst = min((record.value for record in full), default=None)
        yield _at_least(text, worst, 0.9, page.mean(full))
        best = self.best()
        gains = page.find_all("quality.gain_kept", best.name, size.seeds) if best else []
        text = (
            f"the rule that is best on validation text ({best.title if best else 'none yet'}) "
            "keeps 60 % of the long-range gain"
        )
        mean = fmean(gain.value for gain in gains) if gains else None
        yield _at_least(text, mean, 0.6, page.mean(gains))
        cca = self.methods["cca"]
        for rule in dict.fromkeys((cca, best or cca)):
            yield from self._of_rule(rule)

    def _of_rule(self, rule: Method) -> Iterator[Verdict]:
        """Yield the targets of one rule, alone and against its rivals."""
        size = self.size
        far = {"distance": "far", "length": size.length}
        means, cell = self._beside("quality.accuracy", rule.name, "full", far)
        share = means[0] / means[1] if means and means[1] else None
        text = f"beyond the window, {rule.title} answers 95 % of what full attention does"
        yield _at_least(text, share, 0.95, cell)
        passages = size.documents[-1]
        planted = {"task": "multidoc_planted", "documents": passages}
        people = {"task": "multidoc_qa", "documents": passages}
        facts = f"more is right about facts in {passages} passages"
        questions = f"more is right of people's questions about {passages} passages"
        for contest in (
            Contest("perplexity, far, is lower", "quality.perplexity", -1, {"bucket": "far"}),
            Contest("more is right beyond the window", "quality.accuracy", 1, far),
            Contest(facts, "quality.accuracy", 1, planted),
            Contest(questions, "quality.accuracy", 1, people),
        ):
            for title, rivals in RIVALS:
                yield from self._against(rule, contest, title, rivals)

    def _against(
        self, rule: Method, contest: Contest, title: str, rivals: tuple[str, ...]
    ) -> Iterator[Verdict]:
        """Yield the comparison with the strongest of some rivals."""
        leads = []
        for rival in rivals:
            means, cell = self._beside(contest.name, rule.name, rival, contest.params)
            if means:
                leads.append((contest.sign * (means[0] - means[1]), cell, rival))
        if not leads:
            return
        lead, cell, rival = min(leads, key=lambda item: item[0])
        text = (
            f"{rule.title}: {contest.text} than with {title} whose cache is as large (5 % more at "
            "most) or smaller"
        )
        verdict = "missed" if lead < 0 else "the same"
        if lead > 0:
            verdict = "met"
        yield Verdict(text, f"{cell} ({html.escape(self.methods[rival].title)})", verdict)

    def best(self) -> Method | None:
        """Return our best rule on validation text, of those with most seeds.

        Its cache is no larger than the paper's, 5 % more at most.
        """
        cache = "model.cache_bytes"
        paper = cost_of(self.page, cache, self.methods, self.methods["cca"])
        ranked: list[tuple[int, float, Method]] = []
        for method in self.methods.values():
            size = cost_of(self.page, cache, self.methods, method)
            gains = self.page.find_all(
                "quality.gain_kept", method.name, self.size.seeds, split="val"
            )
            candidate = method.trains and method.is_ours and method.stretch == 1
            if not (candidate and gains and size and paper):
                continue
            if size.value <= MORE_ENTRIES * paper.value:
                ranked.append((len(gains), fmean(gain.value for gain in gains), method))
        return max(ranked, key=lambda item: item[:2])[2] if ranked else None

    def _beside(
        self, name: str, ours: str, rival: str, params: dict[str, Any]
    ) -> tuple[tuple[float, float] | None, str]:
        """Return two methods' means over the seeds that both have, and them as HTML."""
        pairs = []
        for seed in self.size.seeds:
            pair = [
                self.page.find(name, stage=f"{method}-{seed}", **params) for method in (ours, rival)
            ]
            if all(pair):
                pairs.append(pair)
        if not pairs:
            return None, DASH
        means, texts = [], []
        for side in zip(*pairs):
            mean = fmean(record.value for record in side)
            text = self.page.cell(side[0])
            if len(side) > 1:
                listed = ", ".join(self.page.cell(record) for record in side)
                text = f"{format_of(side[0])(mean)} ({listed})"
            means.append(mean)
            texts.append(text)
        return (means[0], means[1]), f"{texts[0]} against {texts[1]}"


def _at_least(target: str, value: float | None, least: float, measured: str) -> Verdict:
    if value is None:
        return Verdict(target, measured, "not measured")
    verdict = "met" if value >= least else f"missed by {percent(least - value)}"
    return Verdict(target, measured, verdict)
