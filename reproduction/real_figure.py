"""Draw the share of full attention's gain over the bytes that a cache takes on the device."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from corecontext.drawing import CCA, FULL, pyplot, save
from corecontext.record import Record
from reproduction.real_gains import ENDS
from reproduction.real_tables import NAMES, Line, lines_of, name_of, tasks_of

FETCH = "#c65d12"
MIB = 2**20


def draw_frontier(records: Sequence[Record], path: str) -> None:
    """Draw a point for each method and size: hollow as the model is, filled where trained."""
    figure, panel = pyplot().subplots(figsize=(7.5, 4.2), layout="constrained")
    for trained in (False, True):
        for line in lines_of(records, trained=trained):
            gain = _gain(line)
            if gain is None or not tasks_of(line):
                continue
            color = _color(line)
            x = line.cache["device_bytes"] / MIB
            face = color if trained else "white"
            panel.plot(x, gain, "o", color=color, markerfacecolor=face, markersize=6)
            place = {"textcoords": "offset points", "xytext": (6, -3), "fontsize": 7}
            panel.annotate(name_of(line), (x, gain), color=color, **place)
    panel.axhline(100, color=FULL, lw=1)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("{x:g}")
    panel.set_xlabel("cache on the device after 8,192 tokens, MiB", fontsize=8)
    panel.set_ylabel("full attention's gain over sinks and window kept, %", fontsize=8)
    panel.set_title("SmolLM2-135M: as it is (hollow) and trained (filled)", fontsize=9, loc="left")
    panel.tick_params(labelsize=7, which="both")
    panel.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def _gain(line: Line) -> float | None:
    """Return the mean gain in percent of a line that the figure shows: beside other means, core
    tokens only with their masses."""
    method = line.params["method"]
    if method not in NAMES or (method != "cca" and line.params["core_mass"] is False):
        return None
    if method in ENDS:
        return 0.0
    values = line.values.get("gain")
    return 100 * fmean(values.values()) if values else None


def _color(line: Line) -> str:
    method = line.params["method"]
    if method.startswith("fetch"):
        return FETCH
    return CCA if method.startswith("cca") else FULL
