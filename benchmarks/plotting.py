"""Draw lines with plain axes and a label at the end of each line."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import shown_tokens

LABEL_SIZE = 7
LINE_HEIGHT = 1.25  # of labels, in font sizes
NARROW = 300  # a logarithmic axis of a smaller ratio has labels at 2 and 5 of each decade, too


def draw_line(
    axis: Any, points: Mapping[Any, float | None], label: str, color: str, style: str = "-"
) -> None:
    """Draw a line through the points that have a value; no line where none has."""
    measured = sorted((x, y) for x, y in points.items() if y is not None)
    if measured:
        axis.plot(*zip(*measured), style, marker="o", markersize=3, color=color, label=label)


def finish(
    axis: Any, title: str, x_label: str = "tokens", log_x: bool = True, log_y: bool = True
) -> None:
    """Give a panel its title, scales with plain numbers, and a label at the end of each line.

    A logarithmic x axis is to base 2, with a tick at each measured value, at most nine; linear axes
    start at 0. Call it after all lines are drawn.
    """
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel(x_label, fontsize=8)
    axis.tick_params(labelsize=LABEL_SIZE, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    if not axis.lines:
        return
    values = sorted({x for line in axis.lines for x in line.get_xdata()})
    if log_x:
        axis.set_xscale("log", base=2)
        ticks = values[:: -(-len(values) // 9)]
    else:
        step = 2 ** max(0, int(values[-1]).bit_length() - 3)
        ticks = list(range(0, int(values[-1]) + 1, step))
    axis.set_xticks(ticks, [shown_tokens(x) for x in ticks])
    axis.minorticks_off()
    if log_y:
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.08 * max(max(line.get_ydata()) for line in axis.lines) or 1)
    label_lines(axis)


def label_lines(axis: Any) -> None:
    """Write each line's label right of the panel, in its color, at the height of its last point.

    The y axis gets plain numbers, too.
    """
    axis.autoscale_view()
    _plain_numbers(axis)
    transform = axis.transData + axis.transAxes.inverted()
    ends = []
    for line in axis.lines:
        if not line.get_label().startswith("_"):
            height = transform.transform((line.get_xdata()[-1], line.get_ydata()[-1]))[1]
            ends.append((float(height), line))
    ends.sort(key=lambda end: end[0])
    heights = spread([height for height, _ in ends], _label_height(axis))
    for height, (_, line) in zip(heights, ends):
        axis.annotate(
            line.get_label(),
            (0.98, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=line.get_color(),
            fontsize=LABEL_SIZE,
            annotation_clip=False,
        )


def _plain_numbers(axis: Any) -> None:
    """Show 0.5, 20 and 1,000 on the y axis, on a logarithmic one without powers of ten."""
    from matplotlib.ticker import LogLocator

    axis.yaxis.set_major_formatter("{x:,g}")
    if axis.get_yscale() == "log":
        low, high = axis.get_ylim()
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axis.yaxis.set_minor_formatter("{x:,g}" if high < NARROW * low else "")


def _label_height(axis: Any) -> float:
    """Return a label's height as a fraction of the panel's."""
    panel = axis.get_position().height * axis.figure.get_figheight() * 72
    return LINE_HEIGHT * LABEL_SIZE / panel


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights apart until neighbours are `gap` apart, around their common middle."""
    groups = [[height] for height in heights]
    placed: list[list[float]] = []
    for group in groups:
        # A group that overlaps the last is merged with it, which may then overlap the one before.
        while placed and _bottom(group, gap) < _bottom(placed[-1], gap) + gap * len(placed[-1]):
            group = placed.pop() + group
        placed.append(group)
    return [_bottom(group, gap) + gap * i for group in placed for i in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2
