"""What the operator's records say, row by row: the newest of each kind, full attention beside CCA.

A row compares what one timer measured; of full attention it knows every kernel, by the name of its
backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from corecontext import cost
from corecontext.record import Record

SIZES = ("query_heads", "kv_heads", "head_dim", "batch", "dtype")
FULL = ("full", "sdpa_flash", "sdpa_cudnn", "flash_attn_4")
OTHERS = {"flex": "FlexAttention", "packed": "packed"}
"""Other ways to compute CCA, and how tables call them."""
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
    """CCA's value at one place, with what it is compared with; ms of a pass, us of a decoding step,
    or bytes."""

    device: str
    pass_name: str
    params: dict[str, Any]
    """Of CCA's record: sizes, length, group_size, window_size, ..."""
    cca: float
    full: dict[str, float] = field(default_factory=dict)
    """By backend."""
    others: dict[str, float] = field(default_factory=dict)
    """CCA by other means, by method."""
    floor: float | None = None

    @property
    def length(self) -> int:
        return self.params["length"]

    @property
    def best(self) -> tuple[str, float] | None:
        """The backend that is best at full attention, and its value."""
        return min(self.full.items(), key=lambda item: item[1]) if self.full else None

    @property
    def gain(self) -> float | None:
        """How many times CCA's value the best full attention takes."""
        return (
            self.best[1] / self.cca if self.best and self.cca else None
        )  # tiny inputs may take no memory

    @property
    def graph(self) -> bool:
        """Whether a CUDA graph was timed."""
        return self.params.get("timer") == "graph"

    @property
    def label(self) -> str:
        return LABELS[self.pass_name] + (
            ", CUDA graph" if self.graph and self.pass_name != "decode" else ""
        )

    @property
    def share(self) -> float | None:
        """Of the floor: what CCA would take at the machine's full rate over what it takes."""
        return None if self.floor is None else self.floor / self.cca

    @property
    def tflops(self) -> float:
        """CCA's 10^12 operations a second in a pass."""
        p = self.params
        flops = cost.pass_flops(
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
    def shape(self) -> tuple[Any, ...]:
        """What rows of one series share: device, sizes, g and s, pass and timer."""
        return (
            self.device,
            *_shape(self.params),
            self.params["group_size"],
            self.params["window_size"],
            self.pass_name,
            self.graph,
        )


def _shape(params: Any) -> tuple[Any, ...]:
    return tuple(params.get(size) for size in SIZES)


def pass_of(record: Record) -> str:
    """forward, backward or forward_backward; decode."""
    if record.name == "operator.peak_bytes":
        return "forward_backward" if record.params.get("backward") else "forward"
    return record.name.removeprefix("operator.").removesuffix("_ms").removesuffix("_us")


def rows(records: Iterable[Record], *names: str) -> list[Row]:
    """One row for each of CCA's places among the records of these names, in order of sizes, pass
    and length."""
    found: dict[tuple[Any, ...], dict[tuple[str, str], Record]] = {}
    ours: dict[tuple[Any, ...], Record] = {}
    floors: dict[tuple[Any, ...], float] = {}
    for r in records:
        p = r.params
        if r.name not in names or (r.name == "operator.peak_bytes" and "backward" not in p):
            continue
        place = (r.device, *_shape(p), p["length"], pass_of(r))
        sized = (*place, p.get("group_size"), p.get("window_size"))
        if p["method"] == "floor":
            if p.get("of") == "cca":
                floors[sized] = r.value
        elif p["method"] == "cca":
            ours[(*sized, p.get("timer") == "graph")] = r
        else:
            key = sized if p["method"] in OTHERS else place
            found.setdefault((*key, p.get("timer")), {})[p["method"], p.get("backend", "")] = r
    made = []
    for key, r in ours.items():
        sized, timer = key[:-1], r.params.get("timer")
        row = Row(r.device, pass_of(r), dict(r.params), r.value, floor=floors.get(sized))
        row.full = {
            backend: x.value for (_, backend), x in found.get((*sized[:-2], timer), {}).items()
        }
        row.others = {method: x.value for (method, _), x in found.get((*sized, timer), {}).items()}
        made.append(row)
    devices = list(dict.fromkeys(row.device for row in made))
    return sorted(
        made,
        key=lambda row: (
            devices.index(row.device),
            -row.params["kv_heads"],
            list(LABELS).index(row.pass_name),
            row.graph,
            row.params["batch"],
            row.length,
        ),
    )


def time_rows(records: Iterable[Record]) -> list[Row]:
    """Every pass."""
    return rows(
        records, "operator.forward_ms", "operator.backward_ms", "operator.forward_backward_ms"
    )


def memory_rows(records: Iterable[Record]) -> list[Row]:
    """Peak bytes above the inputs."""
    return rows(records, "operator.peak_bytes")


def decode_rows(records: Iterable[Record]) -> list[Row]:
    """Steps of one layer."""
    return rows(records, "operator.decode_us")


def of_minimum(row: Row, peak: float) -> float:
    """Peak memory, inputs included, over that of q, k, v, out and, in a backward, their gradients.

    Args:
        peak: Bytes above the inputs, which in a backward include the gradient of out.
    """
    p, back = row.params, row.pass_name != "forward"
    sizes = (row.length, p["query_heads"], p["kv_heads"], p["head_dim"], ITEMSIZE[p["dtype"]])
    forward = cost.operator_bytes(*sizes, batch=p["batch"])
    out = p["batch"] * row.length * p["query_heads"] * p["head_dim"] * ITEMSIZE[p["dtype"]]
    given = (
        forward if back else forward - out
    )  # q, k, v and the gradient of out, which is as large as out
    return (peak + given) / cost.operator_bytes(*sizes, batch=p["batch"], backward=back)


def crossovers(found: Iterable[Row]) -> dict[tuple[Any, ...], int | None]:
    """For each series the smallest measured length from which on CCA is faster than the best full
    attention.

    None where it is not even at the longest. Lengths without a full attention say nothing.
    """
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        if row.best:
            series.setdefault(row.shape, []).append(row)
    result: dict[tuple[Any, ...], int | None] = {}
    for shape, of_shape in series.items():
        result[shape] = None
        for row in sorted(of_shape, key=lambda row: -row.length):
            if (row.gain or 0) <= 1:
                break
            result[shape] = row.length
    return result


def skipped(records: Sequence[Record]) -> list[str]:
    """What was left out and why, a line for each method and reason; not what was measured later
    on."""
    measured = {
        (r.device, r.params.get("method"), *_shape(r.params), place, length)
        for r in records
        if r.name != "operator.skipped" and r.name.startswith("operator.")
        for place in (pass_of(r), "all")
        for length in (r.params.get("length"), None)
    }
    lines: dict[tuple[str, str, str], dict[str, list[Any]]] = {}
    for r in records:
        p = r.params
        place = (r.device, p.get("method"), *_shape(p), p.get("pass"), p.get("length"))
        if r.name == "operator.skipped" and (p.get("timer") == "graph" or place not in measured):
            of = lines.setdefault(
                (r.device, p["method"], p["reason"]),
                {"KV heads": [], "batch": [], "pass": [], "L": []},
            )
            for key, value in (
                ("KV heads", p["kv_heads"]),
                ("batch", p["batch"]),
                ("L", p["length"]),
                ("pass", LABELS.get(p["pass"], p["pass"])),
            ):
                if (
                    value is not None
                    and value not in of[key]
                    and (key != "batch" or p["pass"] == "decode")
                ):
                    of[key].append(value)
    return [
        f"{method} not measured on {device}: {reason} ("
        + "; ".join(f"{key} {', '.join(map(str, values))}" for key, values in of.items() if values)
        + ")"
        for (device, method, reason), of in lines.items()
    ]
