"""Draw quality over the bytes that a cache takes on the device: gain kept, and needles found, with
compressed contexts of others."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.drawing import CCA, FULL, pyplot, save
from corecontext.record import Record
from reproduction.real.gains import ENDS, is_other_training
from reproduction.real.methods import PRESETS
from reproduction.real.tables import NAMES, OTHER_WORDING, protocol_tokens
from reproduction.rivals.tables import TITLES

SMOLLM2, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
FETCH, RIVAL = "#c65d12", "#6b5b95"
MIB = 2**20
NEEDLE_TOKENS = 7900
FETCHED = 1024
"""Raw tokens of a query under fetch; others have a table."""
PRESSES = ("kvzip", "tova", "keydiff", "snapkv", "expected_attention")
"""Those shown; the table has more."""
BESIDE_PRESETS = (
    *("full", "streaming_llm", "streaming_llm_wide", "window_of_default", "window_of_small"),
    *("cca", "duo_attention", *PRESETS),
)
"""Methods of the presets' figure."""
SHORT = {
    "full": "full attention",
    "cca": "CCA",
    "cca_raw_heads": "CCA, raw heads",
    "fetch_equal_bytes": "fetch",
    "fetch_raw_heads": "fetch, raw heads",
    "streaming_llm": "sinks and window",
    "expected_attention": "ExpectedAttention",
}
"""Where a label is not that of the tables."""
APART = 5
"""Least distance of labels, in percent."""


class Point(NamedTuple):
    """A method's value at its bytes."""

    label: str
    mib: float
    percent: float
    color: str
    trained: bool


def draw_frontier(records: Sequence[Record], rivals: Sequence[Record], path: str) -> None:
    """Draw gain and needles side by side: hollow as the model is, filled where trained; one point a
    label, of several compressions a line.

    Args:
        records: Of `real`; short trainings are left out.
        rivals: Of `rivals`, whose contexts are compressed before the question.
    """
    records = _of_model(records, SMOLLM2, 8192)
    lengths = (0, protocol_tokens(records))
    records = [record for record in records if record.params["trained_tokens"] in lengths]
    figure, panels = pyplot().subplots(1, 2, figsize=(10, 4.6), layout="constrained", sharey=True)
    needles = [*_needles(records), *_rival_needles(rivals)]
    for panel, title, points in (
        (panels[0], "Gain of full attention over sinks and window", list(_gains(records))),
        (panels[1], f"Needles found in {NEEDLE_TOKENS:,} tokens", needles),
    ):
        _draw(panel, list(dict.fromkeys(points)))
        panel.set_title(title, fontsize=9, loc="left")
    _finish(
        figure,
        panels,
        "Fetch keeps most of what full attention knows in an eighth of its bytes on the device"
        " (SmolLM2-135M as it is: hollow; trained: filled)",
        path,
    )


def draw_presets(records: Sequence[Record], rivals: Sequence[Record], path: str) -> None:
    """Draw the gain on two models as they are, and needles, by the bytes on the device; arguments
    as of `draw_frontier`."""
    untrained, compressed = (
        [r for r in of_all if not r.params["trained_tokens"] and r.params["method"] in shown]
        for of_all, shown in ((records, BESIDE_PRESETS), (rivals, ("kvzip", "snapkv")))
    )
    small, large = _of_model(untrained, SMOLLM2, 8192), _of_model(untrained, GEMMA, 16384)
    figure, panels = pyplot().subplots(1, 3, figsize=(13, 4.2), layout="constrained", sharey=True)
    for panel, title, points in (
        (panels[0], "SmolLM2-135M, 8,192 tokens: gain kept", _gains(small)),
        (panels[1], "Gemma 3 270M, 16,384 tokens: gain kept", _gains(large)),
        (
            panels[2],
            f"SmolLM2-135M, {NEEDLE_TOKENS:,} tokens: needles found",
            [*_needles(small), *_rival_needles(compressed)],
        ),
    ):
        _draw(panel, list(dict.fromkeys(points)))
        panel.set_title(title, fontsize=9, loc="left")
    _finish(
        figure,
        panels,
        "Two pretrained models as they are: the preset `default` keeps what full attention knows",
        path,
    )


def _finish(figure: Any, panels: Any, title: str, path: str) -> None:
    panels[0].set_ylabel("%", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    save(figure, path)


def _of_model(records: Sequence[Record], model: str, length: int) -> list[Record]:
    """Return the records of a model, gains of windows of one length alone."""
    return [
        record
        for record in records
        if record.params["model"] == model
        and (record.params["task"] != "far" or record.params["length"] == length)
    ]


def _draw(panel: Any, points: Sequence[Point]) -> None:
    for label, trained in dict.fromkeys((point.label, point.trained) for point in points):
        of_label = [x for x in points if (x.label, x.trained) == (label, trained)]
        of_label.sort(key=lambda point: point.mib)
        color = of_label[0].color
        face = color if trained else "white"
        values = ([point.mib for point in of_label], [point.percent for point in of_label])
        panel.plot(*values, "o-", color=color, markerfacecolor=face, markersize=5, lw=0.7)
    labelled: dict[str, Point] = {}
    for point in points:
        best = labelled.get(point.label)
        if best is None or point.percent > best.percent:
            labelled[point.label] = point
    heights: list[float] = []
    for point in sorted(labelled.values(), key=lambda point: point.percent):
        height = point.percent
        if heights:
            height = max(height, heights[-1] + APART)
        heights.append(height)
        panel.annotate(
            point.label,
            (point.mib, point.percent),
            xytext=(1.02, height),
            textcoords=("axes fraction", "data"),
            fontsize=7,
            color=point.color,
            va="center",
            arrowprops={"arrowstyle": "-", "color": point.color, "lw": 0.3, "shrinkB": 3},
        )
    panel.set_ylim(-4, 122)
    panel.set_yticks(range(0, 101, 20))
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    panel.set_xticks([10, 20, 50, 100, 200])
    panel.set_xlabel("cache on the device, MiB", fontsize=8)
    panel.tick_params(labelsize=7, which="both")
    panel.spines[["top", "right"]].set_visible(False)


def _gains(records: Sequence[Record]) -> Iterator[Point]:
    """Yield the gain of each method, the mean of its seeds; the ends by definition."""
    newest: dict[tuple[str, bool, float, int], Point] = {}
    for record in records:
        p = record.params
        if not _is_shown(p) or p["task"] != "far":
            continue
        percent = {"full": 100.0, "streaming_llm": 0.0}.get(p["method"])
        if record.name == "real.gain_kept":
            percent = 100 * record.value
        if percent is None or (record.name == "real.gain_kept") == (p["method"] in ENDS):
            continue
        point = _point(p, percent)
        newest[point.label, point.trained, round(point.mib), p["seed"]] = point
    yield from _means_of_seeds(newest)


def _needles(records: Sequence[Record]) -> Iterator[Point]:
    """Yield the share of needles of each method whose context is read with the question, the mean
    of its seeds."""
    newest: dict[tuple[str, bool, float, int], Point] = {}
    for record in records:
        p = record.params
        if record.name != "real.accuracy" or not _is_shown(p):
            continue
        if (record.commit or "").startswith(OTHER_WORDING) or p["length"] != NEEDLE_TOKENS:
            continue
        point = _point(p, 100 * record.value)
        newest[point.label, point.trained, round(point.mib), p["seed"]] = point
    yield from _means_of_seeds(newest)


def _means_of_seeds(newest: Mapping[tuple[str, bool, float, int], Point]) -> Iterator[Point]:
    """Yield the mean of the seeds of each label, trained or not, at each size."""
    for name in dict.fromkeys(key[:-1] for key in newest):
        points = [point for key, point in newest.items() if key[:-1] == name]
        yield points[-1]._replace(percent=fmean(point.percent for point in points))


def _rival_needles(records: Sequence[Record]) -> Iterator[Point]:
    """Yield those of PRESSES, at each compression."""
    newest: dict[tuple[str, int, bool], Point] = {}
    for record in records:
        p = record.params
        if record.name != "real.accuracy" or (p["task"], p["length"]) != ("needles", NEEDLE_TOKENS):
            continue
        method = p["method"]
        if method not in PRESSES:
            continue
        label = SHORT.get(method, TITLES[method])
        trained = bool(p["trained_tokens"])
        size = p["kept_bytes"] / MIB
        newest[method, p["compression"], trained] = Point(
            label, size, 100 * record.value, RIVAL, trained
        )
    yield from newest.values()


def _is_shown(params: dict[str, Any]) -> bool:
    """Whether a line belongs in the figure: core tokens with their masses; fetch of FETCHED tokens
    with the device bytes of CCA, with raw heads, or by bounds, as Quest selects."""
    method = params["method"]
    if method not in NAMES or params.get("rope_theta") is not None or is_other_training(params):
        return False
    if method.startswith(("cca", "fetch")) and not params["core_mass"]:
        return False
    if method == "fetch":
        return params["index"] == "bounds"
    if method == "fetch_equal_bytes":
        return params["fetch_groups"] * params["group_size"] == FETCHED
    return params.get("device_bytes") is not None


def _point(params: dict[str, Any], percent: float) -> Point:
    method = params["method"]
    label = SHORT.get(method, NAMES[method])
    color = FULL
    if method.startswith("cca"):
        color = CCA
    elif method == "fetch_equal_bytes":
        label += f" by {params['index']}"
        color = FETCH
    elif method in ("fetch_raw_heads", *PRESETS):
        color = FETCH
    elif method == "fetch":
        label = f"Quest's selection, {params['fetch_groups'] * params['group_size']} tokens"
        color = RIVAL
    return Point(
        label, params["device_bytes"] / MIB, percent, color, bool(params["trained_tokens"])
    )
