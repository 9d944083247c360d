"""One self-contained HTML page of a reproduction: tables, figures, the paper's rows, the record
behind each number."""

from __future__ import annotations

import base64
import html
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from corecontext.files import atomic_path, write_text
from corecontext.heads.budget import MORE_ENTRIES
from corecontext.record import Record, make_record
from reproduction import paper, plots
from reproduction.plan import (
    DUO,
    PAPER_RIVALS,
    RIVALS,
    SCRATCH,
    SCRATCH_FINE,
    Method,
    Size,
    adapted,
    alike,
    from_scratch,
    later_seed,
    layers_of,
    methods,
    tuned,
)
from reproduction.scoring import windows
from reproduction.texts import Corpus

SHAPES = (("LLaMA2-7B", 32, 32, 128), ("Llama-3.1-8B", 32, 8, 128), ("Qwen2.5-7B", 28, 4, 128))
STYLE = """:root { color-scheme: light dark; }
body { max-width: 70rem; margin: 0 auto; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto; }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; border-bottom: 1px solid #8884; vertical-align: top; }
td a { color: inherit; text-decoration-color: #8888; }
img { max-width: 100%; background: white; }
pre { font-size: .72rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
li:target pre { outline: 2px solid #c60; }"""


class Page:
    """Sections and the records that their numbers link to."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records, self.parts = list(records), []

    def find(self, name: str, **params: Any) -> Record | None:
        """The newest record with these params, or None; perplexities on the test split if none is
        named."""
        if name in ("quality.perplexity", "quality.gain_kept"):
            params.setdefault("split", "test")
        found = [
            one
            for one in self.records
            if one.name == name
            and all(one.params.get(key) == value for key, value in params.items())
        ]
        return found[-1] if found else None

    def cell(self, record: Record | None, show: Callable[[float], str] = "{:.3f}".format) -> str:
        """A number that links to its record; a dash where there is none."""
        if record is None:
            return "&ndash;"
        number = next(i for i, one in enumerate(self.records) if one is record)
        return f'<a href="#r{number}">{show(record.value)}</a>'

    def section(self, anchor: str, title: str, *parts: str) -> None:
        """Add a section."""
        self.parts.append(
            f'<section id="{anchor}"><h2>{html.escape(title)}</h2>{"".join(parts)}</section>'
        )

    def render(self, title: str) -> str:
        """The whole page."""
        held = "".join(
            f'<li id="r{i}" value="{i}"><pre>{html.escape(one.to_json())}</pre></li>'
            for i, one in enumerate(self.records)
        )
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width"><title>{html.escape(title)}</title><style>{STYLE}</style></head><body>'
            f'<h1>{html.escape(title)}</h1>{"".join(self.parts)}<section id="records"><h2>Records</h2>'
            f"<details><summary>{len(self.records)} records, one for each number</summary><ol>{held}</ol></details>"
            "</section><script>addEventListener('hashchange', () => { const at = document.getElementById("
            "location.hash.slice(1)); if (at && at.closest('details')) { at.closest('details').open = true; "
            "at.scrollIntoView(); } });</script></body></html>\n"
        )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        "<table><tr>"
        + "".join(f"<th>{html.escape(one)}</th>" for one in heads)
        + f"</tr>{body}</table>"
    )


def image(path: Path, text: str) -> str:
    """A PNG inside the page."""
    return (
        f'<img alt="{html.escape(text)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}">'
    )


def percent(x: float) -> str:
    """One decimal."""
    return f"{100 * x:.1f} %"


def gains(folder: Path, records: Sequence[Record], size: Size) -> list[Record]:
    """Share of the long-range gain that each method keeps, (ln window - ln x) / (ln window - ln
    full), by seed.

    Over the second half of each window; the window and full attention are those that were adapted,
    or trained from scratch, too. Of stages that try a rate or are measured in brief there is none.
    `low` and `high` are the 95 % interval over documents, drawn again a thousand times with all
    their windows, the same for all methods. Nothing is recorded where full attention gains nothing.
    """
    found, corpus = [], Corpus(folder, None)  # the tokens are in the folder
    for one in records:
        p = one.params
        if (
            one.name != "quality.perplexity"
            or p.get("bucket") != "far"
            or p["method"] in ("full", "window")
        ):
            continue
        stage_of = from_scratch if p["stage"] == from_scratch(p["method"], p["seed"]) else adapted
        names = [*(stage_of(name, p["seed"]) for name in ("window", "full")), p["stage"]]
        paths = [folder / name / f"far_{p['split']}.npy" for name in names]
        if not all(path.exists() for path in paths):
            continue
        window, full, ours = (np.load(path).astype(np.float64) for path in paths)
        if (window - full).mean() <= 0:
            continue
        documents = [document for _, document in windows(corpus, size, p["split"])]
        kept, all_of = (
            np.array(
                [
                    sum(x[i] for i, one in enumerate(documents) if one == document)
                    for document in dict.fromkeys(documents)
                ]
            )
            for x in (window - ours, window - full)
        )
        rng, drawn = random.Random(0), []
        for _ in range(1000):
            some = rng.choices(range(len(kept)), k=len(kept))
            if all_of[some].sum() > 0:
                drawn.append(kept[some].sum() / all_of[some].sum())
        drawn.sort()
        interval = (
            {"low": drawn[len(drawn) // 40], "high": drawn[-1 - len(drawn) // 40]} if drawn else {}
        )
        found.append(
            make_record(
                "quality.gain_kept",
                float((window - ours).mean() / (window - full).mean()),
                {
                    **{k: v for k, v in p.items() if k != "bucket"},
                    **interval,
                    "from": [path.parent.name for path in paths],
                },
                device=one.device,
            )
        )
    return found


def write_report(folder: Path, records: Sequence[Record], size: Size) -> Path:
    """Write report.html and its figures into the folder; sections without records say so."""
    derived = gains(folder, records, size)
    with atomic_path(folder / "derived.jsonl") as name:
        Path(name).write_text("".join(one.to_json() + "\n" for one in derived), encoding="utf-8")
    page, known = Page([*records, *derived]), methods(size)
    drawn = plots.draw_all(folder, page.records, size)
    page.section("what", "What this is", f"<p>{_about(size)}</p>", _targets(page, known, size))
    page.section(
        "methods",
        "Methods, adapted from one model with equal batches, steps and rate",
        _methods(page, known, size),
        drawn_image(drawn, "methods", "gain kept by method"),
    )
    page.section("layers", "Which layers and KV heads need small groups", _layers(page, size))
    page.section(
        "pooling",
        "Pooling (Table 7)",
        _seeds(page, [known[m] for m in ("mean", "max", "cca", "mean_query")], size),
    )
    page.section(
        "sizes",
        "Group and window size, each tuned (Tables 8 and 9)",
        _sizes(page, size),
        drawn_image(drawn, "sizes", "perplexity by group and window size"),
    )
    page.section(
        "strategies",
        "What is trained (Table 10, paper 3.5)",
        table(
            ["strategy", "perplexity, far", "gain kept", "retrieval beyond the window"],
            [
                [html.escape(title), *_shown(page, name, size)]
                for title, name in (
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
            ],
        ),
    )
    page.section(
        "scratch",
        "From scratch, equal tokens in equal order, each with the best of its rates",
        _scratch(page, size),
        drawn_image(drawn, "scratch", "held-out perplexity by tokens trained on"),
    )
    page.section(
        "retrieval",
        "Facts asked for at the end of a text (for Table 4)",
        _retrieval(page, known, size),
    )
    page.section("questions", "Multi-document questions (Table 3)", _questions(page, known, size))
    page.section(
        "cloze",
        "Four-way choice with a constant number of groups (for Table 6)",
        table(
            ["method", "right"],
            [
                [
                    label,
                    page.cell(
                        page.find("quality.accuracy", stage="cloze", method=method, **more), percent
                    ),
                ]
                for label, method, more in (
                    ("full attention", "full", {}),
                    ("CCA, 16 groups", "cca", {"num_groups": 16}),
                    ("CCA, 64 groups", "cca", {"num_groups": 64}),
                )
            ],
        ),
    )
    page.section(
        "flexibility",
        "Other sizes at test time, same weights (Figure 3)",
        f"<p>Adapted at g = {size.group}, s = {size.window}:</p>",
        _grid(page, size, "flexibility"),
        drawn_image(drawn, "flexibility", "perplexity against time for other g and s"),
        "<p>A base model, not adapted:</p>",
        _grid(page, size, "flexibility-base"),
    )
    page.section(
        "curves", "Training curves (Figure 6)", drawn_image(drawn, "curves", "loss by step")
    )
    page.section(
        "maps",
        "Attention is sparse (Figures 1 and 5)",
        drawn_image(drawn, "maps", "attention maps"),
        table(
            ["layer", "weight on the tenth of the keys that has most of it"],
            [
                [str(one.params["layer"]), page.cell(one, percent)]
                for one in page.records
                if one.params.get("stage") == "maps"
            ],
        ),
    )
    page.section(
        "cost",
        "Cache of the paper's shapes (Figure 4, right)",
        _cost(),
        drawn_image(drawn, "cost", "cache by length"),
    )
    page.section(
        "paper",
        "Every row of the paper",
        table(
            ["where", "row", "counterpart", "what differs"],
            [
                [
                    one.where,
                    html.escape(one.row),
                    f'<a href="#{one.here}">{one.here}</a>' if one.here else "none",
                    html.escape(one.why),
                ]
                for one in paper.rows()
            ],
        ),
    )
    out = folder / "report.html"
    write_text(out, page.render("Core Context Aware attention: the paper in miniature"))
    return out


def drawn_image(drawn: dict[str, Path], name: str, text: str) -> str:
    """A figure, or that it is missing."""
    return image(drawn[name], text) if name in drawn else "<p>Not measured yet.</p>"


def _about(size: Size) -> str:
    return (
        f"A Llama of {size.layers} layers, width {size.hidden}, {size.heads} query and {size.kv_heads} KV heads, "
        f"trained here with full attention up to {size.length} tokens, then given each attention and trained on "
        f"for {size.adapt_steps} steps of {size.adapt_tokens} tokens; g = {size.group}, s = {size.window} unless "
        "said otherwise. <i>Far</i> is the second half of each window. The numbers say nothing about a 7B model: "
        "order and trend are what compares with the paper. <i>Beyond the window</i> are questions about what "
        f"stands more than s + g = {size.window + size.group} tokens back, whatever a method's own window. Each "
        "number links to its record."
    )


def _mean(
    page: Page, name: str, method: str, size: Size, **params: Any
) -> tuple[list[Record], str]:
    """A method's records over the seeds, and them as text: the mean, and the seeds' spread where
    there are several."""
    found = [
        one
        for seed in size.seeds
        if (one := page.find(name, stage=f"{method}-{seed}", **params)) is not None
    ]
    if not found:
        return found, "&ndash;"
    show: Callable[[float], str] = "{:.3f}".format if name == "quality.perplexity" else percent
    cells = ", ".join(page.cell(one, show) for one in found)
    if len(found) == 1:
        return found, cells
    values = [one.value for one in found]
    return found, f"{show(fmean(values))} &plusmn; {show(stdev(values))} ({cells})"


def _methods(page: Page, known: dict[str, Method], size: Size) -> str:
    rows = []
    for one in known.values():
        held, time = _cache(page, known, one), _cost_of(page, "model.first_token_s", known, one)
        gains, shown = _mean(page, "quality.gain_kept", one.name, size)
        if gains and "low" in gains[0].params:
            shown += f"<br>[{percent(gains[0].params['low'])}, {percent(gains[0].params['high'])}]"
        quality = _mean(page, "quality.perplexity", one.name, size, bucket="far")
        rows.append(
            [
                html.escape(one.title),
                ", ".join(str(found.params["seed"]) for found in quality[0]),
                quality[1],
                shown,
                _mean(page, "quality.accuracy", one.name, size, distance="far", length=size.length)[
                    1
                ],
                page.cell(held, lambda x: f"{x / 2**20:.2f}"),
                page.cell(time, lambda x: f"{1000 * x:.1f}"),
            ]
        )
    return table(
        [
            "method",
            "seeds",
            "perplexity, far",
            "gain kept [95 %, its first seed]",
            "retrieval beyond the window",
            "cache, MiB",
            "prompt, ms",
        ],
        rows,
    )


def _cost_of(page: Page, name: str, known: dict[str, Method], method: Method) -> Record | None:
    return next(
        (
            found
            for one in alike(known, method)
            if (found := page.find(name, of="methods", method=one))
        ),
        None,
    )


def _cache(page: Page, known: dict[str, Method], method: Method) -> Record | None:
    return _cost_of(page, "model.cache_bytes", known, method)


def _layers(page: Page, size: Size) -> str:
    """The trials of each base model, in columns of what was chosen before."""
    parts = [
        "<p>Validation perplexity, far, of a base model not adapted, where one layer, or one KV head "
        "(layer.head), keeps every token and the rest has groups four times as large.</p>"
    ]
    for seed in dict.fromkeys(size.bases):
        trials = [one for one in page.records if one.params.get("stage") == layers_of(size, seed)]
        for what, some in (
            ("layer", [one for one in trials if "." not in one.params["unit"]]),
            ("KV head", [one for one in trials if "." in one.params["unit"]]),
        ):
            rounds = list(dict.fromkeys(tuple(one.params["beside"]) for one in some))
            of = {(one.params["unit"], tuple(one.params["beside"])): one for one in some}
            parts.append(
                table(
                    [
                        f"{what}, seed {seed}",
                        *(
                            f"beside {', '.join(before)}" if before else "alone"
                            for before in rounds
                        ),
                    ],
                    [
                        [unit, *(page.cell(of.get((unit, before))) for before in rounds)]
                        for unit in dict.fromkeys(one.params["unit"] for one in some)
                    ],
                )
            )
    return "".join(parts)


def _scratch(page: Page, size: Size) -> str:
    tries = table(
        ["method", *(f"rate {rate:g}" for rate in size.rates)],
        [
            [
                name,
                *(
                    page.cell(
                        page.find(
                            "quality.perplexity", stage=tuned(name, rate), bucket="all", split="val"
                        )
                    )
                    for rate in size.rates
                ),
            ]
            for name in SCRATCH
        ],
    )
    tokens = size.step_tokens * sum(steps for _, steps in size.levels)
    return (
        f"<p>{tokens / 1e6:.0f} million tokens each.</p>"
        + table(
            [
                "method",
                "seed",
                "rate",
                "perplexity, far, validation",
                "test",
                "gain kept",
                "retrieval beyond the window",
            ],
            [
                [
                    name,
                    str(seed),
                    f"{found.params['lr']:g}",
                    page.cell(
                        page.find("quality.perplexity", stage=stage, bucket="far", split="val")
                    ),
                    *_three(page, stage, size),
                ]
                for name in (*SCRATCH, *SCRATCH_FINE)
                for seed in dict.fromkeys(size.bases)
                if (
                    found := page.find(
                        "quality.perplexity",
                        stage=(stage := from_scratch(name, seed)),
                        bucket="far",
                    )
                )
                is not None
            ],
        )
        + f"<p>Validation perplexity of short trainings, by rate:</p>{tries}"
    )


def _seeds(page: Page, some: Sequence[Method], size: Size) -> str:
    return table(
        ["pooling", "perplexity, far", "perplexity", "gain kept"],
        [
            [
                html.escape(one.title),
                _mean(page, "quality.perplexity", one.name, size, bucket="far")[1],
                _mean(page, "quality.perplexity", one.name, size, bucket="all")[1],
                _mean(page, "quality.gain_kept", one.name, size)[1],
            ]
            for one in some
        ],
    )


def _shown(page: Page, method: str, size: Size) -> list[str]:
    return [
        _mean(page, "quality.perplexity", method, size, bucket="far")[1],
        _mean(page, "quality.gain_kept", method, size)[1],
        _mean(page, "quality.accuracy", method, size, distance="far", length=size.length)[1],
    ]


def _three(page: Page, stage: str, size: Size) -> list[str]:
    return [
        page.cell(page.find("quality.perplexity", stage=stage, bucket="far")),
        page.cell(page.find("quality.gain_kept", stage=stage), percent),
        page.cell(
            page.find("quality.accuracy", stage=stage, distance="far", length=size.length), percent
        ),
    ]


def _sizes(page: Page, size: Size) -> str:
    rows = []
    for letter, values in (("g", size.groups), ("s", size.windows)):
        for value in values:
            stage = f"{letter}{value}-{later_seed(size)}"
            cost = {
                "of": "sizes",
                "group_size": size.group,
                "window_size": size.window,
                "group_size" if letter == "g" else "window_size": value,
            }
            rows.append(
                [
                    f"{letter} = {value}",
                    page.cell(page.find("quality.perplexity", stage=stage, bucket="all")),
                    page.cell(page.find("quality.perplexity", stage=stage, bucket="far")),
                    page.cell(
                        page.find("model.first_token_s", **cost), lambda x: f"{1000 * x:.1f}"
                    ),
                    page.cell(page.find("model.cache_bytes", **cost), lambda x: f"{x / 2**20:.2f}"),
                ]
            )
    return table(["size", "perplexity", "perplexity, far", "prompt, ms", "cache, MiB"], rows)


def _grid(page: Page, size: Size, stage: str) -> str:
    rows = []
    for g in size.groups:
        rows.append(
            [
                f"g = {g}",
                *(
                    page.cell(
                        page.find(
                            "quality.perplexity",
                            stage=stage,
                            bucket="far",
                            group_size=g,
                            window_size=s,
                        )
                    )
                    for s in size.windows
                ),
            ]
        )
    return table(["perplexity, far", *(f"s = {s}" for s in size.windows)], rows)


def _retrieval(page: Page, known: dict[str, Method], size: Size) -> str:
    lengths = [length for length, _ in size.levels]
    return table(
        ["method", *(f"{length} tokens" for length in lengths), "beyond the window only"],
        [
            [
                html.escape(one.title),
                *(
                    _mean(page, "quality.accuracy", one.name, size, distance="all", length=length)[
                        1
                    ]
                    for length in lengths
                ),
                _mean(page, "quality.accuracy", one.name, size, distance="far", length=size.length)[
                    1
                ],
            ]
            for one in known.values()
        ],
    )


def _questions(page: Page, known: dict[str, Method], size: Size) -> str:
    parts = []
    for task, what in (
        (
            "multidoc_qa",
            "Questions of people (NaturalQuestions) about one of the passages. A model this "
            "small answers few, whatever its attention.",
        ),
        (
            "multidoc_planted",
            "The same kind of passages, each with a planted fact at its end, one of "
            "which is asked for.",
        ),
    ):
        parts.append(
            f"<p>{what} Right where greedy decoding gives the first gold answer.</p>"
            + table(
                ["method", *(f"{n} passages" for n in size.documents)],
                [
                    [
                        html.escape(one.title),
                        *(
                            _mean(page, "quality.accuracy", one.name, size, task=task, documents=n)[
                                1
                            ]
                            for n in size.documents
                        ),
                    ]
                    for one in known.values()
                ],
            )
        )
    return "".join(parts)


def _cost() -> str:
    from corecontext.visibility import num_complete_groups, window_capacity

    rows = []
    for name, layers, kv_heads, dim in SHAPES:
        for length in (2**n for n in range(12, 18)):
            entry = 2 * layers * kv_heads * dim * 2
            ours = min(length, num_complete_groups(length, 16) + window_capacity(16, 1024))
            rows.append(
                [
                    name,
                    f"{length}",
                    f"{length * entry / 2**30:.2f}",
                    f"{ours * entry / 2**30:.2f}",
                    f"{length / ours:.1f}",
                ]
            )
    return (
        "<p>Counted, not measured: 2 x layers x KV heads x head size x 2 bytes an entry, L // g + s + g - 1 "
        "entries; g = 16, s = 1024, half precision.</p>"
        + table(["shape", "tokens", "full, GiB", "CCA, GiB", "times less"], rows)
    )


def _targets(page: Page, known: dict[str, Method], size: Size) -> str:
    """What the project asks of itself, and whether it is met; means over the seeds."""
    lines: list[list[str]] = []

    def line(what: str, value: float | None, least: float, cell: str) -> None:
        verdict = (
            "not measured"
            if value is None
            else "met"
            if value >= least
            else f"missed by {percent(least - value)}"
        )
        lines.append([html.escape(what), cell, verdict])

    full, shown = _mean(page, "quality.accuracy", "full", size, distance="all", length=size.length)
    line(
        "full attention answers at least 90 % at the trained length",
        min((one.value for one in full), default=None),
        0.9,
        shown,
    )
    best = _best(page, known, size)
    title = best.title if best else "none yet"
    gains, shown = _mean(page, "quality.gain_kept", best.name, size) if best else ([], "&ndash;")
    line(
        f"the rule that is best on validation text ({title}) keeps 60 % of the long-range gain",
        fmean(one.value for one in gains) if gains else None,
        0.6,
        shown,
    )
    passages = size.documents[-1]
    for ours in dict.fromkeys((known["cca"], best or known["cca"])):
        far, cell = _beside(
            page, "quality.accuracy", ours.name, "full", size, distance="far", length=size.length
        )
        line(
            f"beyond the window, {ours.title} answers 95 % of what full attention does",
            far[0] / far[1] if far and far[1] else None,
            0.95,
            cell,
        )
        for what, name, sign, params in (
            ("perplexity, far, is lower", "quality.perplexity", -1, {"bucket": "far"}),
            (
                "more is right beyond the window",
                "quality.accuracy",
                1,
                {"distance": "far", "length": size.length},
            ),
            (
                f"more is right about facts in {passages} passages",
                "quality.accuracy",
                1,
                {"task": "multidoc_planted", "documents": passages},
            ),
            (
                f"more is right of people's questions about {passages} passages",
                "quality.accuracy",
                1,
                {"task": "multidoc_qa", "documents": passages},
            ),
        ):
            for others, rivals in (
                ("any of the paper's rivals, or a window,", PAPER_RIVALS),
                ("DuoAttention", DUO),
            ):
                found = [
                    (*both, rival)
                    for rival in rivals
                    if (both := _beside(page, name, ours.name, rival, size, **params))[0]
                    is not None
                ]
                if found:
                    both, cell, rival = min(found, key=lambda one: sign * (one[0][0] - one[0][1]))
                    ahead = sign * (both[0] - both[1])
                    target = (
                        f"{ours.title}: {what} than with {others} whose cache is as large (5 % more at most) or "
                        "smaller"
                    )
                    lines.append(
                        [
                            html.escape(target),
                            f"{cell} ({html.escape(known[rival].title)})",
                            "met" if ahead > 0 else "the same" if ahead == 0 else "missed",
                        ]
                    )
    return table(["target", "measured", ""], lines)


def _best(page: Page, known: dict[str, Method], size: Size) -> Method | None:
    """Of our rules with a cache no larger than the paper's (5 % more at most) the best on other
    text than it is judged by, among those with most seeds."""
    least = _cache(page, known, known["cca"])
    found: list[tuple[int, float, Method]] = []
    for one in known.values():
        held, gains = (
            _cache(page, known, one),
            _mean(page, "quality.gain_kept", one.name, size, split="val")[0],
        )
        if (
            one.trains
            and one.config is not None
            and one.stretch == 1
            and one.name not in RIVALS
            and gains
            and held
            and least
            and held.value <= MORE_ENTRIES * least.value
        ):
            found.append((len(gains), fmean(gain.value for gain in gains), one))
    return max(found, key=lambda one: one[:2], default=(0, 0.0, None))[2]


def _beside(
    page: Page, name: str, ours: str, other: str, size: Size, **params: Any
) -> tuple[tuple[float, float] | None, str]:
    """Two methods' means over the seeds that both have, and them as text."""
    pairs = [
        (a, b)
        for seed in size.seeds
        if (a := page.find(name, stage=f"{ours}-{seed}", **params))
        and (b := page.find(name, stage=f"{other}-{seed}", **params))
    ]
    if not pairs:
        return None, "&ndash;"
    show: Callable[[float], str] = "{:.3f}".format if name == "quality.perplexity" else percent
    means = [fmean(one.value for one in side) for side in zip(*pairs)]
    cells = [
        f"{show(mean)} ({', '.join(page.cell(one, show) for one in side)})"
        if len(pairs) > 1
        else page.cell(side[0], show)
        for mean, side in zip(means, zip(*pairs))
    ]
    return (means[0], means[1]), f"{cells[0]} against {cells[1]}"
