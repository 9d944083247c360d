"""Compare CCA with full attention, row by row, from the operator's records.

A row compares the values of one timer. Records are in order of time: the last of a kind wins.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.floor import operator_bytes, pass_flops
from corecontext.record import Record

SIZES = ("query_heads", "kv_heads", "head_dim", "batch", "dtype")
OTHERS = {
    "flex": "FlexAttention",
    "packed": "packed",
    "cca_sinks": "CCA, 16 first tokens raw",
    "cca_default": "CCA with sinks and masses",
    "fetch": "fetch, 64 groups a query",
    "fetch_shared": "fetch, 64 groups of 16 queries",
    "fetch_mean": "fetch by mean keys, 64 groups a query",
    "fetch_mean_shared": "fetch by mean keys, 64 groups of 16 queries",
    "fetch_default": "fetch by its preset",
    "fetch_default_shared": "fetch by its preset, 16 queries together",
}
"""Titles of other methods that compute CCA."""
KERNEL_TITLES = {"flash": "FlashAttention-2", "cudnn": "cuDNN", "flash_attn_4": "FlashAttention-4"}
"""Titles of full attention's backends in figures."""
LABELS = {
    "forward": "forward",
    "backward": "backward",
    "forward_backward": "forward + backward",
    "decode": "decoding",
    "all": "every pass",
}
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class Row:
    """CCA's value at one place and those compared with it: ms of a pass, us of a step, or bytes."""

    device: str
    pass_name: str
    params: dict[str, Any]
    """Of CCA's record: sizes, length, group_size, window_size, ..."""
    cca: float
    full: dict[str, float] = field(default_factory=dict)
    """Full attention by backend."""
    alternatives: dict[str, float] = field(default_factory=dict)
    """Other methods that compute CCA."""
    floor: float | None = None
    """Least possible time by the machine's rates; None where it was not measured."""

    @property
    def length(self) -> int:
        return self.params["length"]

    @property
    def best(self) -> tuple[str, float] | None:
        """Backend and value of the best full attention."""
        return min(self.full.items(), key=lambda item: item[1]) if self.full else None

    @property
    def gain(self) -> float | None:
        """The best full attention's value over CCA's; None where tiny inputs take no memory."""
        return self.best[1] / self.cca if self.best and self.cca else None

    @property
    def graph(self) -> bool:
        """Whether a CUDA graph was timed."""
        return self.params.get("timer") == "graph"

    @property
    def label(self) -> str:
        graph = self.graph and self.pass_name != "decode"
        label = LABELS[self.pass_name]
        if graph:
            label += ", CUDA graph"
        return label

    @property
    def share(self) -> float | None:
        """The floor over CCA's time: the share of the machine's rate that is reached."""
        return None if self.floor is None else self.floor / self.cca

    @property
    def tflops(self) -> float:
        """CCA's 10^12 operations a second in a pass."""
        p = self.params
        flops = pass_flops(
            self.pass_name,
            p["length"],
            p["query_heads"],
            p["kv_heads"],
            p["head_dim"],
            group_size=p["group_size"],
            window_size=p["window_size"],
            batch=p["batch"],
        )
        return flops / self.cca / 1e9

    @property
    def series(self) -> tuple[Any, ...]:
        """The key that rows of several lengths share."""
        p = self.params
        config = (p["group_size"], p["window_size"], self.pass_name, self.graph)
        return (self.device, *_sizes(p), *config)


def _sizes(params: Any) -> tuple[Any, ...]:
    return tuple(params.get(size) for size in SIZES)


def pass_of(record: Record) -> str:
    """Return forward, backward, forward_backward or decode."""
    if record.name == "operator.peak_bytes":
        return "forward_backward" if record.params.get("backward") else "forward"
    return record.name.removeprefix("operator.").removesuffix("_ms").removesuffix("_us")


class Place(NamedTuple):
    """Sizes and pass of a measurement, whatever the method."""

    device: str
    sizes: tuple[Any, ...]
    """As SIZES."""
    length: int
    pass_name: str


class Settings(NamedTuple):
    """A place and the settings of CCA."""

    place: Place
    group_size: int | None
    window_size: int | None


def rows(records: Iterable[Record], *names: str) -> list[Row]:
    """Return a row for each of CCA's places, in order of device, KV heads, pass and length."""
    # By timer too: full attention has no settings of CCA, other methods that compute CCA do.
    full: dict[tuple[Place, str | None], dict[str, float]] = {}
    alternatives: dict[tuple[Settings, str | None], dict[str, float]] = {}
    cca: dict[tuple[Settings, bool], Record] = {}
    floors: dict[Settings, float] = {}
    for r in records:
        p = r.params
        if r.name not in names or (r.name == "operator.peak_bytes" and "backward" not in p):
            continue
        place = Place(r.device, _sizes(p), p["length"], pass_of(r))
        settings = Settings(place, p.get("group_size"), p.get("window_size"))
        timer = p.get("timer")
        if p["method"] == "floor":
            if p.get("of") == "cca":
                floors[settings] = r.value
        elif p["method"] == "cca":
            cca[settings, timer == "graph"] = r
        elif p["method"] in OTHERS:
            alternatives.setdefault((settings, timer), {})[p["method"]] = r.value
        else:
            full.setdefault((place, timer), {})[p.get("backend", "")] = r.value
    made = []
    for (settings, _), r in cca.items():
        timer = r.params.get("timer")
        row = Row(r.device, pass_of(r), dict(r.params), r.value, floor=floors.get(settings))
        row.full = dict(full.get((settings.place, timer), {}))
        row.alternatives = dict(alternatives.get((settings, timer), {}))
        made.append(row)
    devices = list(dict.fromkeys(row.device for row in made))

    def order(row: Row) -> tuple[Any, ...]:
        number = list(LABELS).index(row.pass_name)
        sizes = (row.params["batch"], row.length)
        return (devices.index(row.device), -row.params["kv_heads"], number, row.graph, *sizes)

    return sorted(made, key=order)


def time_rows(records: Iterable[Record]) -> list[Row]:
    """Return the rows of every pass."""
    names = ("operator.forward_ms", "operator.backward_ms", "operator.forward_backward_ms")
    return rows(records, *names)


def memory_rows(records: Iterable[Record]) -> list[Row]:
    """Return the rows of peak bytes above the inputs."""
    return rows(records, "operator.peak_bytes")


def decode_rows(records: Iterable[Record]) -> list[Row]:
    """Return the rows of decoding steps of one layer."""
    return rows(records, "operator.decode_us")


def ratio_to_minimum(row: Row, peak: float) -> float:
    """Return all memory in use over that of q, k, v, out and, in a backward, their gradients.

    Args:
        peak: Bytes above the inputs, which in a backward include the gradient of out.
    """
    p = row.params
    backward = row.pass_name != "forward"
    sizes = (row.length, p["query_heads"], p["kv_heads"], p["head_dim"], ITEMSIZE[p["dtype"]])
    forward = operator_bytes(*sizes, batch=p["batch"])
    out = p["batch"] * row.length * p["query_heads"] * p["head_dim"] * ITEMSIZE[p["dtype"]]
    inputs = forward - out
    if backward:
        inputs += out  # the gradient of out is as large as out
    return (peak + inputs) / operator_bytes(*sizes, batch=p["batch"], backward=backward)


def crossovers(rows: Iterable[Row]) -> dict[tuple[Any, ...], int | None]:
    """Return, by series, the smallest measured length from which on CCA is the faster.

    None where it is not even at the longest. Lengths without full attention are left out.
    """
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.best:
            series.setdefault(row.series, []).append(row)
    result: dict[tuple[Any, ...], int | None] = {}
    for key, compared in series.items():
        result[key] = None
        for row in sorted(compared, key=lambda row: -row.length):
            if (row.gain or 0) <= 1:
                break
            result[key] = row.length
    return result


def skipped(records: Sequence[Record]) -> list[str]:
    """Return a line for each method and reason of a skip, unless a later or other run has it."""
    measured = {
        (r.device, r.params.get("method"), *_sizes(r.params), pass_name, length)
        for r in records
        if r.name != "operator.skipped" and r.name.startswith("operator.")
        for pass_name in (pass_of(r), "all")
        for length in (r.params.get("length"), None)
    }
    lines: dict[tuple[str, str, str], dict[str, dict[Any, None]]] = {}
    for r in records:
        p = r.params
        run = (r.device, p.get("method"), *_sizes(p), p.get("pass"), p.get("length"))
        if r.name != "operator.skipped" or (p.get("timer") != "graph" and run in measured):
            continue
        places = lines.setdefault(
            (r.device, p["method"], p["reason"]), {"KV heads": {}, "batch": {}, "pass": {}, "L": {}}
        )
        places["KV heads"][p["kv_heads"]] = None
        places["pass"][LABELS.get(p["pass"], p["pass"])] = None
        if p["pass"] == "decode":
            places["batch"][p["batch"]] = None
        if p["length"] is not None:
            places["L"][p["length"]] = None
    return [
        f"{method} not measured on {device}: {reason} ("
        + "; ".join(f"{key} {', '.join(map(str, at))}" for key, at in places.items() if at)
        + ")"
        for (device, method, reason), places in lines.items()
    ]
