"""Hold CCA's settings in one frozen, validated dataclass, and say what follows from them: where
raw tokens are, how many slots there are."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

from corecontext.config.field_checks import (
    check_choice,
    check_flag,
    check_int,
    check_sizes,
    check_sizes_by_layer,
    did_you_mean,
    optional,
    shown,
)
from corecontext.config.indices import check_index
from corecontext.config.presets import DEFAULTS, PAPER_RULE, PRESETS
from corecontext.config.removed import check_not_removed, refuses_removed, without_removed

CORE_POSITIONS = ("middle", "token")
CACHE_DTYPES = ("auto", "int8", "fp8")
STORES = ("none", "device", "host")
PREFILLS = ("auto", "fetch", "full")
BACKENDS = ("auto", "reference", "packed", "triton")

_MANY_SLOTS_TOKENS = 81920
"""Room of a cache, in tokens, up to which a GPU has 2 k slots for fetched groups; above, fewer."""


@dataclass(frozen=True)
class CCAConfig:
    """Core Context Aware attention, as docs/math.md defines it.

    The defaults are the preset `default`: fetch, with raw tokens in host memory, raw first tokens
    and masses of core tokens, as pretrained models need. `CCAConfig.preset` makes other presets,
    `CCAConfig.pooling` core tokens alone and `CCAConfig.paper` the paper's rule. A changed field
    changes no other: `fetch_groups` counts groups, so `CCAConfig(group_size=16)` fetches half as
    many raw tokens, 64 * 16. Commands, the server and training offer fields as options; the first
    sentence under a field is its help.
    """

    group_size: int = DEFAULTS["group_size"]
    """Tokens per core token (g), at least 1. With 1 the attention is full attention."""
    window_size: int = DEFAULTS["window_size"]
    """Nearest tokens that every query sees uncompressed (s), at least 1."""
    num_groups: int | None = None
    """A constant number of groups (m): g = max(1, ceil((L - s) / m)) then follows each sequence's
    length."""
    core_position: str = "middle"
    """Rotary position of a core key: "middle" of its group (the paper), or "token": keys pooled as
    they are."""
    layer_group_sizes: tuple[int | tuple[int, ...], ...] | None = None
    """g of each full-attention layer, in order, instead of group_size for all; or for each KV head
    of a layer, a tuple. A head whose g is 1 keeps every token."""
    sink_size: int = DEFAULTS["sink_size"]
    """First tokens of a sequence that every query sees uncompressed, rounded up to a multiple of g
    (each layer's own); their groups are not pooled. 0, the paper's rule, keeps none."""
    cache_dtype: str = "auto"
    """Format of cached keys and values: "auto" (as computed), or 8 bits with a scale for each entry
    and head, "int8" or "fp8" (e4m3). Attention through a cache then sees the rounded ones; training
    without a cache does not."""
    head_group_sizes: tuple[int, ...] | None = None
    """g of each KV head, in order, in every layer."""
    backend: str = "auto"
    """Implementation: "auto", "packed" (plain torch, linear memory), "triton" (GPU kernels) or
    "reference" (dense)."""
    core_mass: bool = DEFAULTS["core_mass"]
    """Add to a core token's score the entropy of its pooling weights, so that it weighs at most as
    its group does. This is eq. 14 of docs/math.md."""
    fetch_groups: int = DEFAULTS["fetch_groups"]
    """Groups whose raw tokens each query sees instead of their core tokens (k); 0 is CCA. They are
    the best by the index, chosen for each KV head, whose own g counts. With all groups that a query
    sees, this is full attention (docs/fetch.md)."""
    fetch_index: str = DEFAULTS["fetch_index"]
    """Scores that choose the groups: of the "mean" key, "parts:P:B" (means of P parts of a group,
    in B = 1, 2 or 4 bits), "pairs:B" (parts of two tokens), "bits:B" (all keys), or "oracle" (all
    keys as they are)."""
    fetch_share: int = 16
    """Neighbouring queries of a prompt read into a cache that share one choice, aligned to absolute
    positions, of twice as many groups. Their choice depends on all of them, so a query's depends on
    up to fetch_share - 1 later tokens of the prompt. Tokens that are decoded, scored or trained on
    choose each by itself."""
    store: str = DEFAULTS["store"]
    """Where a cache keeps the raw tokens that fetch reads: beside the compact cache on the
    "device", in pinned "host" memory, or "none": then a cache refuses fetch. Without fetch none
    are kept."""
    fetch_slots: int | None = None
    """Slots of recently fetched groups on the device for each row and KV head with store "host", at
    least fetch_groups; 0 has none: each step reads its groups from host memory. By default a GPU
    has as many for a room of tokens as `slots_for` says."""
    prefill: str = "auto"
    """Attention by which a prompt is read into a cache: "auto" (with fetch full attention while it
    takes less time, then shared choices; without fetch these settings), "fetch" (these settings,
    each token by its own choice, also where full attention takes less time) or "full" (full
    attention, exactly). The cache, and decoding from it, are those of these settings
    (docs/cache.md). Calls that fill no cache are read by these settings."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            check_not_removed(name, getattr(self, name))
            object.__setattr__(self, name, check(name, getattr(self, name)))
        names = ("layer_group_sizes", "head_group_sizes")
        varying = [name for name in names if getattr(self, name) is not None]
        if varying and self.num_groups is not None:
            raise ValueError(f"num_groups must not be given with {varying[0]}: both set g.")
        if len(varying) == 2:
            raise ValueError(
                "head_group_sizes must not be given with layer_group_sizes, whose entries may be "
                "tuples."
            )
        if self.fetch_slots and self.fetch_slots < self.fetch_groups:
            raise ValueError(
                f"fetch_slots must be 0 or at least fetch_groups {self.fetch_groups}, got "
                f"{self.fetch_slots}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a model's config.json."""
        return dataclasses.asdict(self)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> CCAConfig:
        """Make the config of a name in `PRESETS`; `changes` replace single fields."""
        check_choice("preset", name, tuple(PRESETS))
        return cls(**PRESETS[name].settings | changes)

    @classmethod
    def pooling(
        cls,
        group_size: int = PAPER_RULE["group_size"],
        window_size: int = PAPER_RULE["window_size"],
        **changes: Any,
    ) -> CCAConfig:
        """Make a config without fetch: core tokens stand for the far past. The first tokens are
        raw and core tokens have masses; `changes` replace other fields."""
        return cls.preset("pooling", group_size=group_size, window_size=window_size, **changes)

    @classmethod
    def paper(
        cls,
        group_size: int = PAPER_RULE["group_size"],
        window_size: int = PAPER_RULE["window_size"],
        **changes: Any,
    ) -> CCAConfig:
        """Make a config of the paper's rule: no first tokens are kept raw, nothing is added to the
        scores of core tokens, and no raw tokens are fetched. `changes` replace other fields."""
        return cls.preset("paper", group_size=group_size, window_size=window_size, **changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CCAConfig:
        """Make a config from the dict of `to_dict`, of this version or an earlier one; unknown keys
        are errors. A dict without a field was saved before the field existed: it means the value of
        `PAPER_RULE`, not today's default."""
        if not isinstance(values, Mapping):
            raise TypeError(f"CCA settings must map names to values, got {shown(values)}.")
        values = without_removed(values)
        names = cls.__dataclass_fields__
        for key in values:
            if key not in names:
                hint = did_you_mean(key, names) or f" Known: {', '.join(names)}."
                raise ValueError(f"unknown CCA setting {shown(key)}.{hint}")
        # mutant config: an old checkpoint gets today's default
        return cls(**{**PAPER_RULE, **values})

    @classmethod
    def saved_in(cls, hf_config: Any) -> CCAConfig:
        """Return the settings in a checkpoint's config.json, or the defaults if it has none."""
        saved = getattr(hf_config, "cca", None)
        # mutant config: a checkpoint without settings gets the paper's rule
        return cls.from_dict(saved) if saved else cls()

    def replace(self, **changes: Any) -> CCAConfig:
        """Return a copy with some fields changed, validated again; a new group_size is that of
        every layer and head."""
        if changes.get("group_size", self.group_size) != self.group_size:
            changes = {"layer_group_sizes": None, "head_group_sizes": None, **changes}
        return type(self).from_dict({**self.to_dict(), **changes})

    @property
    def keeps_raw_while_reading(self) -> bool:
        """Whether a cache keeps raw tokens only while full attention reads a prompt: without fetch
        nothing else needs them."""
        return self.prefill == "full" and not self.fetch_groups

    @property
    def fetches_from_host(self) -> bool:
        """Whether a cache keeps raw tokens in host memory."""
        return self.fetch_groups > 0 and self.store == "host"

    def slots_for(self, length: int, *, on_gpu: bool | None = None) -> int:
        """Return the slots of a row and KV head, in a cache with room for `length` tokens.

        By default a GPU has 2 k, in which a step on real text finds 96 % of its groups, and in a
        large cache 3 k / 2, in which it finds 93 % (docs/fetch-results.md).

        Args:
            on_gpu: Whether the cache is on a GPU; None: whether this machine has one.
        """
        if self.fetch_slots is not None:
            return self.fetch_slots
        if on_gpu is None:
            import torch  # imported here: help texts of commands need no tensors

            on_gpu = torch.cuda.is_available()
        if not on_gpu:
            return 0
        return self.fetch_groups * (4 if length <= _MANY_SLOTS_TOKENS else 3) // 2

    @property
    def fetches_by_slots(self) -> bool:
        """Whether a cache keeps fetched groups in slots on the device. A step in Triton finds there
        which are missing; other steps ask the device for it, and cannot be captured."""
        return self.fetches_from_host and self.slots_for(length=0) > 0  # and so at any length

    @property
    def varies(self) -> bool:
        """Whether layers or heads have a g of their own."""
        return self.layer_group_sizes is not None or self.head_group_sizes is not None

    def of_layer(self, index: int) -> CCAConfig:
        """Return the settings of one full-attention layer, counted from 0.

        Raises:
            ValueError: layer_group_sizes has none for it.
        """
        sizes = self.layer_group_sizes
        if sizes is None:
            return self
        if index >= len(sizes):
            raise ValueError(
                "layer_group_sizes must have one g for each full-attention layer, got "
                f"{len(sizes)}."
            )
        name = "head_group_sizes" if isinstance(sizes[index], tuple) else "group_size"
        return self.replace(**{"layer_group_sizes": None, name: sizes[index]})

    def of_process(self, rank: int, processes: int) -> CCAConfig:
        """Return a layer's settings for the KV heads of one process, where tensor parallelism
        splits them evenly."""
        sizes = self.head_group_sizes
        if sizes is None or processes == 1:
            return self
        count = len(sizes) // processes
        sizes = sizes[rank * count : (rank + 1) * count]
        if len(set(sizes)) == 1:
            return self.replace(group_size=sizes[0], head_group_sizes=None)
        return self.replace(head_group_sizes=sizes)


CCAConfig.__init__ = refuses_removed(CCAConfig.__init__)  # type: ignore[method-assign]


@cache
def field_help(kind: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass by the field's name, on one line."""
    tree: Any = ast.parse(inspect.getsource(kind))
    texts = {}
    for statement, docstring in pairwise(tree.body[0].body):
        if isinstance(statement, ast.AnnAssign) and isinstance(docstring, ast.Expr):
            text = ast.literal_eval(docstring.value)
            texts[ast.unparse(statement.target)] = " ".join(text.split())
    return texts


def setting_help(name: str) -> str:
    """Return the first sentence under a field of CCAConfig."""
    return field_help(CCAConfig)[name].partition(". ")[0].removesuffix(".") + "."


# The check of each field: it gets the field's name and value, and returns the value or raises.
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "group_size": partial(check_int, least=1),
    "window_size": partial(check_int, least=1, why=" (a query sees itself)"),
    "num_groups": optional(partial(check_int, least=1)),
    "core_position": partial(check_choice, allowed=CORE_POSITIONS),
    "layer_group_sizes": optional(check_sizes_by_layer),
    "sink_size": partial(check_int, least=0),
    "cache_dtype": partial(check_choice, allowed=CACHE_DTYPES),
    "head_group_sizes": optional(check_sizes),
    "backend": partial(check_choice, allowed=BACKENDS),
    "core_mass": check_flag,
    "fetch_groups": partial(check_int, least=0),
    "fetch_index": check_index,
    "fetch_share": partial(check_int, least=1),
    "store": partial(check_choice, allowed=STORES),
    "fetch_slots": optional(partial(check_int, least=0)),
    "prefill": partial(check_choice, allowed=PREFILLS),
}
