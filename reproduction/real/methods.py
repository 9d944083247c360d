"""Make the attentions that are compared on a pretrained model, all from the same sizes.

A new method is one more row of METHODS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.head_budget import Shape, Unit, at_equal_cache
from corecontext import cost
from corecontext.baselines.sink_methods import StreamingLLM, WindowOnly
from corecontext.config import PAPER_RULE, CCAConfig
from corecontext.visibility import num_sinks
from reproduction.attentions.duo_attention import DuoAttention


@dataclass(frozen=True)
class Sizes:
    """Sizes that all methods share."""

    length: int = 8192
    """Tokens at which caches have equal bytes."""
    group_size: int = PAPER_RULE["group_size"]
    window_size: int = 512
    sink_size: int = 16
    core_mass: bool = False
    fetch_groups: int = 32
    fetch_index: str = PAPER_RULE["fetch_index"]
    store: str = PAPER_RULE["store"]
    fetch_slots: int = 0
    head_dim: int = 64
    """Of the model; `RealModel` sets it."""
    fetch_group_size: int | None = None
    """Of fetch at equal bytes, where CCA's is another."""

    def cca(self) -> CCAConfig:
        """Return the settings of CCA."""
        return CCAConfig.pooling(
            self.group_size,
            self.window_size,
            sink_size=self.sink_size,
            core_mass=self.core_mass,
        )

    def fetch(self) -> CCAConfig:
        """Return the settings of CCA whose queries fetch groups, each query by its own choice."""
        settings = {"fetch_groups": self.fetch_groups, "fetch_index": self.fetch_index}
        settings |= {"store": self.store, "fetch_slots": self.fetch_slots}
        return self.cca().replace(**settings, prefill="fetch")

    def fetch_equal_bytes(self, group_size: int | None = None) -> CCAConfig:
        """Return fetch from host memory with the widest window, in whole groups, whose device bytes
        are at most those of CCA without masses, in 16 bits.

        Args:
            group_size: Of fetch, where CCA's is another.

        Raises:
            ValueError: the index alone takes more.
        """
        g = group_size or self.group_size
        config = self.fetch().replace(store="host", fetch_slots=0, group_size=g)
        budget = self._device_bytes(self.cca().replace(core_mass=False))
        for window in range(self.window_size, 0, -g):
            narrow = config.replace(window_size=window)
            if self._device_bytes(narrow) <= budget:
                return narrow
        raise ValueError(
            f"window_size must be larger than {self.window_size} for the index "
            f"{self.fetch_index!r} to fit in its bytes. Take a smaller index."
        )

    def _device_bytes(self, config: CCAConfig) -> int:
        """Count the bytes on the device of a KV head."""
        head = cost.ModelCost(1, 1, 1, self.head_dim, 0, 0)
        return head.config_bytes(config, self.length).device

    def wide_window(self) -> int:
        """Return the window that takes the bytes of CCA's window and core tokens."""
        return self.window_size + self.length // self.group_size

    def window_of(self, config: CCAConfig) -> StreamingLLM:
        """Return sinks and the widest window with at most the device bytes of other settings."""
        entry = 4 * self.head_dim  # a key and a value, in 16 bits
        return StreamingLLM(self.sink_size, self._device_bytes(config) // entry - self.sink_size)


class Heads(NamedTuple):
    """The KV heads of a model that keep every token."""

    shape: Shape
    chosen: tuple[Unit, ...] = ()

    def by_layer(self) -> tuple[tuple[int, ...], ...]:
        """Return the heads of each layer."""
        return tuple(
            tuple(
                unit.head for unit in self.chosen if unit.layer == layer and unit.head is not None
            )
            for layer in range(self.shape.layers)
        )

    def __str__(self) -> str:
        return ",".join(f"{unit.layer}:{unit.head}" for unit in self.chosen)


def equal_heads(sizes: Sizes, shape: Shape) -> int:
    """Return how many KV heads can keep every token, the others sinks and window, in the bytes of
    CCA's cache; at least one."""
    heads = shape.layers * shape.kv_heads
    g, s = sizes.group_size, sizes.window_size
    entries = cost.cache_entries(sizes.length, g, s, sinks=num_sinks(sizes.sink_size, g))
    nearest = s + sizes.sink_size
    return max(1, heads * (entries - nearest) // max(1, sizes.length - nearest))


def _with_raw_heads(config: CCAConfig, sizes: Sizes, heads: Heads) -> CCAConfig:
    return at_equal_cache(heads.shape, heads.chosen, config, sizes.length, raw=True)


PRESETS = {name: CCAConfig.preset(name, fetch_slots=0) for name in ("default", "small")}
"""Settings of fetch with a name, the same for every model. Slots change no result: their bytes are
left out here, and are in what a user waits for (`python -m benchmarks user`)."""
METHODS: dict[str, Callable[[Sizes, Heads], Any]] = {
    "full": lambda sizes, heads: None,
    "window": lambda sizes, heads: WindowOnly(window_size=sizes.window_size),
    "streaming_llm": lambda sizes, heads: StreamingLLM(sizes.sink_size, sizes.window_size),
    "streaming_llm_wide": lambda sizes, heads: StreamingLLM(sizes.sink_size, sizes.wide_window()),
    "cca_paper": lambda sizes, heads: CCAConfig.paper(sizes.group_size, sizes.window_size),
    "cca": lambda sizes, heads: sizes.cca(),
    "cca_raw_heads": lambda sizes, heads: _with_raw_heads(sizes.cca(), sizes, heads),
    "duo_attention": lambda sizes, heads: DuoAttention(
        heads.by_layer(), sizes.sink_size, sizes.window_size
    ),
    "fetch": lambda sizes, heads: sizes.fetch(),
    "fetch_equal_bytes": lambda sizes, heads: sizes.fetch_equal_bytes(sizes.fetch_group_size),
    "fetch_raw_heads": lambda sizes, heads: _with_raw_heads(sizes.fetch(), sizes, heads),
    "default": lambda sizes, heads: PRESETS["default"],
    "small": lambda sizes, heads: PRESETS["small"],
    "window_of_default": lambda sizes, heads: sizes.window_of(PRESETS["default"]),
    "window_of_small": lambda sizes, heads: sizes.window_of(PRESETS["small"]),
}
"""How each method is made: a CCAConfig, a rival's settings, or None for full attention."""
WITH_HEADS = ("cca_raw_heads", "duo_attention", "fetch_raw_heads")
"""Methods in which chosen KV heads keep every token."""
TITLES = {  # in the order of tables; three methods are gone, and have records
    "full": "full attention",
    "window": "window",
    "streaming_llm": "sinks and window",
    "streaming_llm_wide": "sinks and a wider window, the bytes of CCA",
    "cca_paper": "CCA, the paper's rule",
    "cca": "CCA",
    "cca_heavy_token": "CCA, the heaviest token of each group raw",
    "cca_heavy_tokens": "CCA, the two heaviest tokens of each group raw",
    "cca_worst_groups": "CCA, the groups that core tokens represent worst raw",
    "cca_raw_heads": "CCA, some KV heads keep every token",
    "duo_attention": "DuoAttention: the same heads, the others sinks and window",
    "fetch": "CCA that fetches groups",
    "fetch_equal_bytes": "CCA that fetches groups, on the device the bytes of CCA",
    "fetch_raw_heads": "CCA that fetches groups, some KV heads keep every token",
    "default": "preset `default`",
    "small": "preset `small`",
    "window_of_default": "sinks and a window, the bytes of `default`",
    "window_of_small": "sinks and a window, the bytes of `small`",
}


def describe(attention: Any, heads: Heads) -> dict[str, Any]:
    """Return the sizes of an attention for a record's params; None where it has no such size."""
    names = ("group_size", "window_size", "sink_size", "core_mass", "raw_heads")
    params: dict[str, Any] = dict.fromkeys((*names, "full_heads", "fetch_groups", "index", "store"))
    if attention is None:
        return params
    params["window_size"] = attention.window_size
    with_heads = isinstance(attention, DuoAttention)
    if isinstance(attention, CCAConfig):
        params["group_size"] = attention.group_size
        params["sink_size"] = attention.sink_size
        params["core_mass"] = attention.core_mass
        with_heads = attention.layer_group_sizes is not None
        if attention.fetch_groups:
            params["fetch_groups"] = attention.fetch_groups
            params["index"] = attention.fetch_index
            params["store"] = attention.store
        if attention.fetch_slots:
            params["slots"] = attention.fetch_slots
    else:
        params["sink_size"] = attention.sinks
    if with_heads:
        params["raw_heads"] = len(heads.chosen)
        params["full_heads"] = str(heads)
    return params
