"""Collect the newest records of whole models, and compare the methods of each."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from corecontext.config import PAPER_RULE
from corecontext.record import Record

NAMES = {
    "model.first_token_s": "first token",
    "model.next_token_ms": "next token",
    "model.cache_bytes": "cache",
    "model.peak_bytes": "peak memory",
    "model.tokens_per_s": "tokens per second",
}
SKIPPED = {"growing cache": "prompt and growing cache", "prompt": "prompt and steps"}
"""Longer names of skipped measurements."""
METHOD_LABELS = {
    "cca": "CCA",
    "cca_raw": "CCA, some heads raw",
    "fetch": "CCA, 64 groups fetched",
    "fetch_host": "CCA, 64 groups fetched from host memory",
    "streaming_llm": "StreamingLLM",
    "sdpa_flash": "full (flash)",
    "sdpa_cudnn": "full (cuDNN)",
    "full_rows": "full (rows)",
}

Model = tuple[Any, ...]
"""Device, shape and dtype."""


@dataclass
class Comparison:
    """Values of every method for one model at one length on one device, under one g and s."""

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

    @property
    def config(self) -> tuple[int, int]:
        """g and s."""
        return self.params["group_size"], self.params["window_size"]

    @property
    def model(self) -> Model:
        """The key that comparisons of one model share."""
        return self.device, self.params["shape"], self.params["dtype"]

    def value(self, name: str, label: str) -> float | None:
        """Return one method's value, or None."""
        record = self.values.get(name, {}).get(label)
        return None if record is None else record.value

    def best_full(self, name: str) -> tuple[str, float] | None:
        """Return the label and value of the best full attention."""
        values = {
            label: r.value
            for label, r in self.values.get(name, {}).items()
            if is_full(r.params["method"])
        }
        best = max if name == "model.tokens_per_s" else min
        return best(values.items(), key=lambda item: item[1]) if values else None

    def best_cca(self, name: str) -> float | None:
        """Return the best value of CCA, fused or not."""
        best = max if name == "model.tokens_per_s" else min
        values = [
            r.value for r in self.values.get(name, {}).values() if r.params["method"] == "cca"
        ]
        return best(values) if values else None

    def gain(self, name: str) -> float | None:
        """Return how many times better CCA is than the best full attention."""
        cca = self.best_cca(name)
        full = self.best_full(name)
        if cca is None or full is None:
            return None
        return cca / full[1] if name == "model.tokens_per_s" else full[1] / cca


def is_full(method: str) -> bool:
    """Whether a method is full attention."""
    return method in ("full", "full_rows") or method.startswith("sdpa_")


def label_of(params: Any) -> str:
    """Return a method's label in tables and figures, with its variants."""
    method = params["method"]
    words = [METHOD_LABELS.get(method, "full")]
    if params.get("fuse") == "compile":
        words.append("fused")
    if method == "cca" and "cache_dtype" in params:
        words.append(params["cache_dtype"])
    if method == "cca" and "chunk_size" in params:
        words.append(f"chunks of {params['chunk_size']}")
    if params.get("cache") == "static":
        words.append("static cache")
    return ", ".join(words)


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """Return a comparison for each device, model, dtype, g, s and length; newer values replace
    older.

    Methods without g and s are compared with CCA of every g and s.
    """
    measured = [r for r in records if r.name in NAMES]
    made: dict[tuple[Any, ...], Comparison] = {}
    for r in measured:
        if r.params["method"] == "cca":
            made.setdefault(_key(r), Comparison(r.device, {})).params = dict(r.params)
    for r in measured:
        ours = r.params["method"] in ("cca", "cca_raw", "fetch", "fetch_host")
        configured = ours or r.params.get("of") == "cca"
        for key, comparison in made.items():
            if key == _key(r) or (not configured and key[:-2] == _key(r)[:-2]):
                _add(comparison, r)
    models = list(dict.fromkeys(key[:2] for key in made))
    return [made[key] for key in sorted(made, key=lambda key: (models.index(key[:2]), *key[2:]))]


def _add(comparison: Comparison, record: Record) -> None:
    params = record.params
    name = record.name
    if params["method"] == "floor":
        comparison.floors[name, params["of"]] = record.value
        return
    by_label = comparison.values.setdefault(name, {})
    label = label_of(params)
    before = by_label.get(label)
    # Of tokens per second the best batch stays, unless the same batch was measured anew.
    if (
        name == "model.tokens_per_s"
        and before is not None
        and before.params["batch"] != params["batch"]
        and before.value >= record.value
    ):
        return
    by_label[label] = record


def _key(record: Record) -> tuple[Any, ...]:
    p = record.params
    config = (p.get("group_size", 0), p.get("window_size", 0))
    return (record.device, p["shape"], p["dtype"], p["length"], *config)


def main_comparisons(measured: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons of each model's main g and s: of most lengths, then the defaults."""
    counts: dict[Model, Counter[tuple[int, int]]] = {}
    for comparison in measured:
        counts.setdefault(comparison.model, Counter())[comparison.config] += 1
    defaults = (PAPER_RULE["group_size"], PAPER_RULE["window_size"])
    chosen = {
        model: max(configs, key=lambda config: (configs[config], config == defaults))
        for model, configs in counts.items()
    }
    return [comparison for comparison in measured if chosen[comparison.model] == comparison.config]


def by_model(measured: Sequence[Comparison]) -> dict[Model, list[Comparison]]:
    """Return the comparisons of each device, model and dtype, by length."""
    models: dict[Model, list[Comparison]] = {}
    for comparison in measured:
        models.setdefault(comparison.model, []).append(comparison)
    return models


def labels(measured: Sequence[Comparison], name: str) -> list[str]:
    """Return every method with a value of this name, CCA last."""
    seen = dict.fromkeys(
        label for comparison in measured for label in comparison.values.get(name, {})
    )
    return sorted(seen, key=lambda label: label.startswith("CCA"))


def skipped(records: Sequence[Record]) -> list[str]:
    """Return a line for each skipped measurement that was not made later on."""
    last = {
        _kind(r): i
        for i, r in enumerate(records)
        if r.name in NAMES and r.params["method"] != "floor"
    }
    lines: dict[str, dict[str, None]] = {}
    for i, r in enumerate(records):
        p = r.params
        if r.name == "model.skipped" and last.get(_kind(r), -1) < i:
            task = SKIPPED.get(p["what"], p["what"])
            line = f"{label_of(p)} not measured on {r.device}, {p['shape']}, {task}: {p['reason']}"
            batch = f" at batch {p['batch']}" if p["what"] == "throughput" else ""
            lines.setdefault(line, {})[f"{p['length']}{batch}"] = None
    return [f"{line} (L {', '.join(lengths)})" for line, lengths in lines.items()]


def _kind(record: Record) -> tuple[Any, ...]:
    """Return the key that a measurement shares with its being skipped."""
    p = record.params
    throughput = record.name == "model.tokens_per_s" or p.get("what") == "throughput"
    return (*_key(record), label_of(p), p["batch"], throughput)
