"""What the records of whole models say: the newest of each kind by place, method by method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from corecontext.record import Record

NAMES = {
    "model.first_token_s": "first token",
    "model.next_token_ms": "next token",
    "model.cache_bytes": "cache",
    "model.peak_bytes": "peak memory",
    "model.tokens_per_s": "tokens per second",
}
WHAT = {"growing cache": "prompt and growing cache", "prompt": "prompt and steps"}


@dataclass
class Place:
    """Values of every method for one model at one length on one device."""

    device: str
    params: dict[str, Any]
    """Of one of its records."""
    values: dict[str, dict[str, Record]] = field(default_factory=dict)
    """By name and method's label; of tokens per second the best batch."""
    floors: dict[tuple[str, str], float] = field(default_factory=dict)
    """By name and "full" or "cca"."""

    @property
    def length(self) -> int:
        return self.params["length"]

    def value(self, name: str, label: str) -> float | None:
        """One method's value, or None."""
        found = self.values.get(name, {}).get(label)
        return None if found is None else found.value

    def best_full(self, name: str) -> tuple[str, float] | None:
        """The label and value of the best full attention."""
        most = name == "model.tokens_per_s"
        found = [
            (label, r.value)
            for label, r in self.values.get(name, {}).items()
            if is_full(r.params["method"])
        ]
        return (max if most else min)(found, key=lambda item: item[1]) if found else None

    def best_cca(self, name: str) -> float | None:
        """Return the best value of CCA, fused or not."""
        best = max if name == "model.tokens_per_s" else min
        values = [
            r.value for r in self.values.get(name, {}).values() if r.params["method"] == "cca"
        ]
        return best(values) if values else None

    def gain(self, name: str) -> float | None:
        """How many times better CCA is than the best full attention."""
        ours = self.best_cca(name)
        full = self.best_full(name)
        if ours is None or full is None:
            return None
        return ours / full[1] if name == "model.tokens_per_s" else full[1] / ours


def is_full(method: str) -> bool:
    """Whether a method is full attention."""
    return method in ("full", "full_rows") or method.startswith("sdpa_")


def label_of(params: Any) -> str:
    """How tables and figures call what a record measured."""
    method = params["method"]
    if method == "cca":
        return (
            "CCA"
            + (", fused" if params.get("fuse") == "compile" else "")
            + (f", {params['cache_dtype']}" if "cache_dtype" in params else "")
            + (f", chunks of {params['chunk_size']}" if "chunk_size" in params else "")
        )
    if method == "cca_raw":
        return "CCA, some heads raw" + (", fused" if params.get("fuse") == "compile" else "")
    if method == "streaming_llm":
        return "StreamingLLM"
    kernel = {
        "sdpa_flash": "full (flash)",
        "sdpa_cudnn": "full (cuDNN)",
        "full_rows": "full (rows)",
    }.get(method, "full")
    return kernel + (", static cache" if params.get("cache") == "static" else "")


def places(records: Iterable[Record]) -> list[Place]:
    """One for each device, model, dtype, g, s and length; newer values replace older ones.

    Methods without g and s stand beside CCA of every g and s.
    """
    measured = [r for r in records if r.name in NAMES]
    ours = dict.fromkeys(_key(r) for r in measured if r.params["method"] == "cca")
    found = {key: Place(key[0], {}) for key in ours}
    tokens: dict[tuple[Any, ...], dict[tuple[str, int], Record]] = {}
    for r in measured:
        p = r.params
        for key in ours:
            mine = _key(r)
            sized = p["method"] in ("cca", "cca_raw") or p.get("of") == "cca"
            if mine != key and (sized or mine[:-2] != key[:-2]):
                continue
            place = found[key]
            if p["method"] == "cca":
                place.params = dict(p)
            if p["method"] == "floor":
                place.floors[r.name, p["of"]] = r.value
            elif r.name == "model.tokens_per_s":
                tokens.setdefault(key, {})[label_of(p), p["batch"]] = r
            else:
                place.values.setdefault(r.name, {})[label_of(p)] = r
    for key, by_batch in tokens.items():
        best: dict[str, Record] = {}
        for (label, _), r in by_batch.items():
            if label not in best or r.value > best[label].value:
                best[label] = r
        found[key].values["model.tokens_per_s"] = best
    order = list(dict.fromkeys((key[0], key[1]) for key in found))
    return [found[key] for key in sorted(found, key=lambda key: (order.index(key[:2]), *key[2:]))]


def _key(record: Record) -> tuple[Any, ...]:
    p = record.params
    return (
        record.device,
        p["shape"],
        p["dtype"],
        p["length"],
        p.get("group_size", 0),
        p.get("window_size", 0),
    )


def main_places(found: Sequence[Place]) -> list[Place]:
    """Those of the g and s that each model was measured at most lengths with, the defaults where
    there are several."""
    counts: dict[tuple[Any, ...], dict[tuple[int, int], int]] = {}
    for place in found:
        sizes = counts.setdefault(_model(place), {})
        pair = place.params["group_size"], place.params["window_size"]
        sizes[pair] = sizes.get(pair, 0) + 1
    chosen = {
        model: max(sizes, key=lambda pair: (sizes[pair], pair == (16, 1024)))
        for model, sizes in counts.items()
    }
    return [
        place
        for place in found
        if chosen[_model(place)] == (place.params["group_size"], place.params["window_size"])
    ]


def _model(place: Place) -> tuple[Any, ...]:
    return place.device, place.params["shape"], place.params["dtype"]


def by_model(found: Sequence[Place]) -> dict[tuple[Any, ...], list[Place]]:
    """Places of each device, model and dtype, by length."""
    models: dict[tuple[Any, ...], list[Place]] = {}
    for place in found:
        models.setdefault(_model(place), []).append(place)
    return models


def labels(found: Sequence[Place], name: str) -> list[str]:
    """Every method that has a value of this name, CCA last."""
    seen = dict.fromkeys(label for place in found for label in place.values.get(name, {}))
    return sorted(seen, key=lambda label: label.startswith("CCA"))


def skipped(records: Sequence[Record]) -> list[str]:
    """What was left out and why; not what was measured later on."""
    last = {
        _kind(r): i
        for i, r in enumerate(records)
        if r.name in NAMES and r.params["method"] != "floor"
    }
    lines: dict[tuple[str, ...], list[str]] = {}
    for i, r in enumerate(records):
        if r.name == "model.skipped" and last.get(_kind(r), -1) < i:
            p = r.params
            batch = f" at batch {p['batch']}" if p["what"] == "throughput" else ""
            lines.setdefault(
                (label_of(p), p["shape"], WHAT.get(p["what"], p["what"]), r.device, p["reason"]), []
            ).append(f"{p['length']}{batch}")
    return [
        f"{label} not measured on {device}, {shape}, {what}: {reason} (L {', '.join(dict.fromkeys(at))})"
        for (label, shape, what, device, reason), at in lines.items()
    ]


def _kind(record: Record) -> tuple[Any, ...]:
    """What a measurement and its being skipped share."""
    p = record.params
    throughput = record.name == "model.tokens_per_s" or p.get("what") == "throughput"
    return (*_key(record), label_of(p), p["batch"], throughput)
