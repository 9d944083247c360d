"""Figures and README's tables, drawn from records: no number is ever typed by hand.

`python -m corecontext.bench.figures` draws results/*.svg; with `--readme` it also rewrites README's tables, which
stand between `<!-- table: NAME -->` and `<!-- end table -->`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from corecontext.record import Record, read_records
from corecontext.text import UserError, atomic_path, write_text

SUFFIXES = (".png", ".svg", ".pdf")
FULL, CCA, FLOOR = "#9a9a9a", "#1f6fb4", "#d08a2e"
DEMO_ROWS = (("time to first token", "first_token_s", "{:.2f} s", 1), ("time per further token", "next_token_ms",
             "{:.1f} ms", 1), ("cache", "cache_bytes", "{:.1f} MiB", 2 ** 20),
             ("peak memory of the prefill", "peak_bytes", "{:.1f} MiB", 2 ** 20),
             ("perplexity", "perplexity", "{:.3f}", 1), ("planted facts found", "retrieval_accuracy", "{:.0%}", 1))
SIZES = ("query_heads", "kv_heads", "head_dim", "batch", "dtype")


def check_plot(path: str) -> None:
    """Raise before any work is done if a figure cannot be drawn.

    Raises:
        UserError: matplotlib is missing, or the file's ending says no known format.
    """
    if Path(path).suffix not in SUFFIXES:
        raise UserError(f"plot must end in {', '.join(SUFFIXES)}, got '{path}'.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("plot needs matplotlib, which is not installed. Install it with: "
                        "pip install 'corecontext[plot]'") from None


def draw_demo(records: Sequence[Record], path: str) -> None:
    """Bars of what the demo measured, full attention beside CCA."""
    pyplot = _pyplot()
    rows = [row for row in DEMO_ROWS if row[1] != "retrieval_accuracy"]
    figure, axes = pyplot.subplots(1, len(rows), figsize=(2.3 * len(rows), 2.6), layout="constrained")
    for axis, (label, name, shown, unit) in zip(axes, rows):
        values = [newest(records, f"demo.{name}", method=method).value / unit for method in ("full", "cca")]
        bars = axis.bar(("full", "CCA"), values, color=(FULL, CCA))
        axis.bar_label(bars, [shown.format(value) for value in values], fontsize=8)
        axis.set_title(label, fontsize=9)
        axis.set_yticks([])
        axis.margins(y=0.15)
        axis.spines[["top", "right", "left"]].set_visible(False)
    params = newest(records, "demo.first_token_s", method="cca").params
    figure.supxlabel(f"{params['length']} tokens, g = {params['group_size']}, s = {params['window_size']}; "
                     f"{records[0].device}", fontsize=8)
    _save(figure, path)


def draw_operator(records: Sequence[Record], path: str) -> None:
    """Time against its floor, and peak memory by length; of the device measured last."""
    pyplot = _pyplot()
    records = [r for r in records if r.device == records[-1].device]
    rows = operator_rows(records)
    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(11, max(3.4, 0.6 * len(rows))), layout="constrained")
    bars: list[tuple[str, float, str]] = []
    for row in rows:
        label = f"{row['pass']}, L = {row['length']}"
        bars += [(f"{label}, full", row["full"], FULL), (f"{label}, CCA", row["cca"], CCA)]
        if row["floor"]:
            bars.append((f"{label}, floor of CCA", row["floor"], FLOOR))
    drawn = time.barh(range(len(bars)), [b[1] for b in bars], color=[b[2] for b in bars])
    time.bar_label(drawn, [f"{b[1]:.0f} ms" for b in bars], fontsize=8, padding=3)
    time.set_yticks(range(len(bars)), [b[0] for b in bars], fontsize=7)
    time.invert_yaxis()
    time.margins(x=0.15)
    time.set_title("time", fontsize=9)
    for method, color in (("full", FULL), ("cca", CCA)):
        for backward, style in ((False, "-"), (True, "--")):
            points = {r.params["length"]: r.value / 2 ** 20 for r in records  # the newest of each length
                      if r.name == "operator.peak_bytes" and r.params["method"] == method
                      and r.params.get("backward") is backward}
            if points:
                memory.plot(*zip(*sorted(points.items())), style, marker="o", color=color,
                            label=f"{method}, {'forward + backward' if backward else 'forward'}")
    memory.set(xlabel="length", ylabel="MiB", xlim=(0, None), ylim=(0, None))
    memory.set_title("peak memory above the inputs", fontsize=9)
    memory.legend(fontsize=7)
    figure.suptitle(records[0].device, fontsize=9)
    _save(figure, path)


def demo_table(records: Sequence[Record]) -> str:
    """README's table of the demo, in Markdown."""
    params = newest(records, "demo.first_token_s", method="cca").params
    lines = [f"`corecontext demo` on {records[-1].device}: {params['length']} tokens, {params['dtype']}, "
             f"g = {params['group_size']}, s = {params['window_size']}.", "",
             "| | full attention | CCA |", "|---|---:|---:|"]
    for label, name, shown, unit in DEMO_ROWS:
        values = [newest(records, f"demo.{name}", method=method).value / unit for method in ("full", "cca")]
        lines.append(f"| {label} | " + " | ".join(shown.format(value) for value in values) + " |")
    return "\n".join(lines) + "\n"


def operator_table(records: Sequence[Record]) -> str:
    """README's table of the operator against the fastest full attention recorded at the same sizes, in Markdown."""
    lines = ["| device | heads, KV heads, D | dtype | g, s | L | pass | full attention | CCA | | floor of CCA |",
             "|---|---|---|---|---:|---|---:|---:|---:|---:|"]
    for row in operator_rows(records):
        floor = _ms(row['floor']) if row['floor'] else ""
        lines.append(f"| {row['device']} | {row['query_heads']}, {row['kv_heads']}, {row['head_dim']} | {row['dtype']} "
                     f"| {row['group_size']}, {row['window_size']} | {row['length']} | {row['pass']} | "
                     f"{_ms(row['full'])} ({row['backend']}) | {_ms(row['cca'])} | {row['full'] / row['cca']:.1f}x | "
                     f"{floor} |")
    memory = memory_rows(records)
    if memory:
        lines += ["", "Peak memory above the inputs grows linearly with the length:", "",
                  "| device | pass | method | L: MiB |", "|---|---|---|---|"]
        lines += [f"| {device} | {name} | {method} | " + ", ".join(f"{n}: {x:.0f}" for n, x in sorted(peaks.items())) +
                  " |" for (device, name, method), peaks in memory.items()]
    return "\n".join(lines) + "\n"


def memory_rows(records: Iterable[Record]) -> dict[tuple[str, str, str], dict[int, float]]:
    """MiB by length for each device, pass and method; the newest of each. Other shapes than the first are left out."""
    shape, rows = None, dict[tuple[str, str, str], dict[int, float]]()
    for r in records:
        if r.name == "operator.peak_bytes" and "backward" in r.params:
            sizes = (r.device, *(r.params.get(size) for size in SIZES))
            shape = shape or sizes
            if sizes == shape:
                name = "forward + backward" if r.params["backward"] else "forward"
                rows.setdefault((r.device, name, r.params["method"]), {})[r.params["length"]] = r.value / 2 ** 20
    return rows


def operator_rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """CCA's newest times beside the fastest full attention of the same device, sizes and pass."""
    full: dict[tuple[Any, ...], dict[str, Record]] = {}
    ours: dict[tuple[Any, ...], Record] = {}
    floors: dict[tuple[Any, ...], float] = {}
    for r in records:
        if r.name not in ("operator.forward_ms", "operator.backward_ms", "operator.forward_backward_ms"):
            continue
        p = r.params
        key = (r.device, p["length"], *(p.get(size) for size in SIZES), r.name)
        sized = (*key, p.get("group_size"), p.get("window_size"))
        if p["method"] == "full":
            full.setdefault(key, {})[p.get("backend", "")] = r
        elif p["method"] == "cca":
            ours[sized] = r
        elif p["method"] == "floor" and p.get("of") == "cca":
            floors[sized] = r.value
    rows = []
    for sized, r in ours.items():
        rivals = full.get(sized[:-2])
        if rivals:
            best = min(rivals.values(), key=lambda rival: rival.value)
            rows.append({**r.params, "device": r.device, "full": best.value, "cca": r.value,
                         "backend": best.params.get("backend", ""), "floor": floors.get(sized),
                         "pass": r.name.removeprefix("operator.").removesuffix("_ms").replace("_", " + ")})
    return rows


def newest(records: Iterable[Record], name: str, **params: Any) -> Record:
    """The last record of this name and these params.

    Raises:
        ValueError: there is none.
    """
    for r in reversed(list(records)):
        if r.name == name and all(r.params.get(key) == value for key, value in params.items()):
            return r
    raise ValueError(f"records must hold {name} with {params}, got none.")


def update_readme(text: str, results: Path) -> str:
    """README with its tables made anew from the records; a table without records stays as it is."""
    for name, draw in (("demo", demo_table), ("operator", operator_table)):
        path = results / f"{name}.jsonl"
        if path.exists():
            before, mark, rest = text.partition(f"<!-- table: {name} -->\n")
            if mark:
                text = before + mark + draw(read_records(path)) + rest[rest.index("<!-- end table -->"):]
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Draw every figure that has records; with --readme rewrite README's tables too."""
    parser = argparse.ArgumentParser(prog="python -m corecontext.bench.figures", description=main.__doc__)
    parser.add_argument("--results", default="results", help="folder of the records")
    parser.add_argument("--readme", nargs="?", const="README.md", help="also rewrite the tables of this file")
    options = parser.parse_args(argv)
    results = Path(options.results)
    for name, draw in (("demo", draw_demo), ("operator", draw_operator)):
        if (results / f"{name}.jsonl").exists():
            draw(read_records(results / f"{name}.jsonl"), str(results / f"{name}.svg"))
    if options.readme:
        text = Path(options.readme).read_text(encoding="utf-8")
        write_text(options.readme, update_readme(text, results))
    return 0


def _ms(value: float) -> str:
    """Milliseconds with three figures."""
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


def _pyplot() -> Any:
    """matplotlib without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: str) -> None:
    """Write the whole figure or nothing."""
    with atomic_path(path) as name:
        figure.savefig(name, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)
    _pyplot().close(figure)


if __name__ == "__main__":
    sys.exit(main())
