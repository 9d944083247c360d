"""Configure CCA attention: one frozen, validated description of a model's attention."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial, wraps
from itertools import pairwise
from sys import float_info
from typing import Any, NamedTuple, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_GROUP_SIZE = 16
DEFAULT_WINDOW_SIZE = 1024
DEFAULT_SINK_SIZE = 16
"""One group of the default size. Pretrained models direct much of their attention at the first
tokens, and lose most of what they know where these are pooled."""

# Three sets of settings have a name: CCAConfig's defaults, for a pretrained model as it is; the
# paper's rule; and what training adapts a model to.
PAPER_RULE: dict[str, Any] = {"sink_size": 0, "core_mass": False}
"""Values of the fields whose defaults are not the paper's: those of `cca_attention` and of
`CCAConfig.paper`. A saved config without one of these fields was written when its default was this
value."""
FETCH_RECIPE: dict[str, Any] = {
    "fetch_groups": 32,
    "fetch_index": "bits:2",
    "store": "host",
    "group_size": 32,
    "window_size": 160,
}
"""Settings to which `corecontext train` adapts a pretrained model. With the index, a row of 8,192
tokens takes the bytes on the device of groups of 16 and a window of 512."""
CORE_POSITIONS = ("middle", "token")
CACHE_DTYPES = ("auto", "int8", "fp8")
INDICES = {
    "mean": "corecontext.ops.fetch.mean:Mean",
    "parts:P:B": "corecontext.ops.fetch.low_bits:Parts",
    "pairs:B": "corecontext.ops.fetch.low_bits:Pairs",
    "bits:B": "corecontext.ops.fetch.low_bits:Bits",
    "oracle": "corecontext.ops.fetch.oracle:Oracle",
}
"""The class of each index of fetch, by the form of its name; P is a number of parts, at least 1,
and B of bits, 1, 2 or 4."""
_NUMBERS = {"P": "([1-9][0-9]{0,8})", "B": "([124])"}
STORES = ("none", "device", "host")
PREFILLS = ("auto", "cca", "fetch", "full")
BACKENDS = ("auto", "reference", "packed", "triton")
MOST = 2**31 - 1
"""The largest size: kernels count tokens in 32-bit integers."""


@dataclass(frozen=True)
class CCAConfig:
    """Core Context Aware attention, as docs/math.md defines it.

    The defaults keep the first tokens raw and add core tokens' masses to their scores, which
    pretrained models need; `CCAConfig.paper()` is the paper's rule exactly. Commands, the server
    and training offer fields as options; the first sentence under a field is its help.
    """

    group_size: int = DEFAULT_GROUP_SIZE
    """Tokens per core token (g), at least 1. With 1 the attention is full attention."""
    window_size: int = DEFAULT_WINDOW_SIZE
    """Nearest tokens that every query sees uncompressed (s), at least 1."""
    num_groups: int | None = None
    """A constant number of groups (m): g = max(1, ceil((L - s) / m)) then follows each sequence's
    length."""
    core_position: str = "middle"
    """Rotary position of a core key: "middle" of its group (the paper), or "token": keys pooled as
    they are."""
    core_bias: float = 0.0
    """Added to every core token's score; log(group_size) without `core_mass` is proportional
    attention."""
    layer_group_sizes: tuple[int | tuple[int, ...], ...] | None = None
    """g of each full-attention layer, in order, instead of group_size for all; or for each KV head
    of a layer, a tuple. A head whose g is 1 keeps every token."""
    sink_size: int = DEFAULT_SINK_SIZE
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
    core_mass: bool = True
    """Add to a core token's score the entropy of its pooling weights, so that it weighs at most as
    its group does. This is eq. 14 of docs/math.md."""
    fetch_groups: int = 0
    """Groups whose raw tokens each query sees instead of their core tokens (k); 0 is CCA. They are
    the best by the index, chosen by KV head; each head's own g counts. With all groups that a query
    sees, this is full attention (docs/fetch.md)."""
    fetch_index: str = "pairs:2"
    """Scores that choose the groups: of the "mean" key, "parts:P:B" (means of P parts of a group,
    in B = 1, 2 or 4 bits), "pairs:B" (parts of two tokens), "bits:B" (all keys), or "oracle" (all
    keys as they are)."""
    fetch_share: int = 1
    """Neighbouring queries that share one choice, aligned to absolute positions. Above 1 the choice
    looks up to fetch_share - 1 tokens ahead: for prompts only, never where perplexity is measured
    or a model is trained."""
    store: str = "device"
    """Where a cache keeps the raw tokens that fetch reads: beside the compact cache on the
    "device", in pinned "host" memory, or "none": then a cache refuses fetch. Without fetch none
    are kept."""
    fetch_slots: int = 0
    """Slots of recently fetched groups on the device for each row and KV head with store "host", at
    least fetch_groups; 0 has none: each step reads its groups from host memory."""
    prefill: str = "auto"
    """Attention by which a prompt is read into a cache: "auto" (these settings), "cca" (without
    fetch), "fetch", or "full" (full attention, exactly). The cache, and decoding from it, are those
    of these settings (docs/cache.md). Calls that fill no cache are read by these settings."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            check_not_removed(name, getattr(self, name))
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.prefill == "fetch" and not self.fetch_groups:
            raise ValueError(
                "prefill must not be 'fetch' with fetch_groups=0. Give fetch_groups, or "
                "prefill='auto'."
            )
        names = ("layer_group_sizes", "head_group_sizes")
        varying = [name for name in names if getattr(self, name) is not None]
        if varying and self.num_groups is not None:
            raise ValueError(f"num_groups must not be given with {varying[0]}: both set g.")
        if len(varying) == 2:
            raise ValueError(
                "head_group_sizes must not be given with layer_group_sizes, whose entries may be "
                "tuples."
            )
        if 0 < self.fetch_slots < self.fetch_groups:
            raise ValueError(
                f"fetch_slots must be 0 or at least fetch_groups {self.fetch_groups}, got "
                f"{self.fetch_slots}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for a model's config.json."""
        return dataclasses.asdict(self)

    @classmethod
    def paper(
        cls,
        group_size: int = DEFAULT_GROUP_SIZE,
        window_size: int = DEFAULT_WINDOW_SIZE,
        **changes: Any,
    ) -> CCAConfig:
        """Make a config of the paper's rule, whatever the defaults are: no first tokens are kept
        raw, and nothing is added to the scores of core tokens. `changes` replace other fields."""
        return cls(group_size, window_size, **PAPER_RULE | changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CCAConfig:
        """Make a config from the dict of `to_dict`, of this version or an earlier one; unknown keys
        are errors.

        A dict without `sink_size` or `core_mass` was saved before these existed, and its model was
        trained by the paper's rule: it means `PAPER_RULE`, not today's defaults.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"CCA settings must map names to values, got {values!r}.")
        values = without_removed(values)
        names = cls.__dataclass_fields__
        for key in values:
            if key not in names:
                hint = did_you_mean(key, names) or f" Known: {', '.join(names)}."
                raise ValueError(f"unknown CCA setting {key!r}.{hint}")
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
    def fetches_from_host(self) -> bool:
        """Whether a cache keeps raw tokens in host memory."""
        return self.fetch_groups > 0 and self.store == "host"

    @property
    def fetches_by_slots(self) -> bool:
        """Whether a cache keeps fetched groups on the device. Only the fused step finds those that
        are missing on the device itself; others ask it, and are not captured."""
        return self.fetches_from_host and self.fetch_slots > 0

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
        """Return a layer's settings for one of several equal shares of its KV heads (tensor
        parallelism)."""
        sizes = self.head_group_sizes
        if sizes is None or processes == 1:
            return self
        count = len(sizes) // processes
        share = sizes[rank * count : (rank + 1) * count]
        if len(set(share)) == 1:
            return self.replace(group_size=share[0], head_group_sizes=None)
        return self.replace(head_group_sizes=share)


class Removed(NamedTuple):
    """Describe values of a setting that an earlier version had."""

    field: str
    """Of `CCAConfig`, in that version; a saved config may have others of its values."""
    values: str
    """A regular expression of all that are gone."""
    what: str
    """What they were."""
    instead: str
    """What to use: a sentence."""
    since: str = "0.2"
    """The first version without them."""


REMOVED = (
    Removed("fetch_index", "core", "the index of core tokens", "Use 'mean' or 'pairs:2'."),
    Removed("fetch_index", "bounds", "the index of least and largest values", "Use 'pairs:2'."),
    Removed(
        "fetch_index", r"segments:\d+:\d+", "an index of segments of a group", "Use 'pairs:2'."
    ),
    Removed("fetch_index", r"parts:\d+", "an index of means as they are", "Use 'parts:P:B'."),
    Removed(
        "pooling",
        "(?!cca$).*",
        "another rule for core tokens than the paper's",
        "Leave it out; in a clone, `python -m reproduction` has mean and max pooling.",
    ),
    Removed("core_heads", "(?!kv$).*", "a core token for each query head", "Leave it out."),
    Removed(
        "learned",
        r"(?!\(\)$|\[\]$).*",
        "learned parameters of core tokens",
        "Leave it out, and train the model's own weights.",
    ),
)
"""Settings that are gone: a saved config, a command or a keyword that has one is refused. A field
that is no more is ignored at other values."""


def check_not_removed(field: str, value: Any) -> None:
    """Raise ValueError where an earlier version had this value of a setting."""
    for row in REMOVED:
        if field == row.field and re.fullmatch(row.values, str(value)):
            # mutant config: a removed setting is ignored
            raise ValueError(
                f"{field} must not be {value!r}, {row.what}, which is gone since version "
                f"{row.since}. {row.instead}"
            )


def without_removed(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings without fields of `CCAConfig` that are no more.

    Raises:
        ValueError: one of these has a value that is gone.
    """
    names = CCAConfig.__dataclass_fields__
    gone = [row.field for row in REMOVED if row.field in settings and row.field not in names]
    for field in gone:
        check_not_removed(field, settings[field])
    if not gone:
        return settings
    return {field: value for field, value in settings.items() if field not in gone}


def refuses_removed(function: F) -> F:
    """Let a function take keywords of earlier versions, and refuse values that are gone."""

    @wraps(function)
    def checked(*args: Any, **settings: Any) -> Any:
        return function(*args, **without_removed(settings))

    return cast(F, checked)


CCAConfig.__init__ = refuses_removed(CCAConfig.__init__)  # type: ignore[method-assign]


def check_int(name: str, value: Any, least: int, why: str = "") -> int:
    """Return value, or raise unless it is an int of at least `least` (a bool is no size)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__}).")
    if value < least:
        raise ValueError(f"{name} must be at least {least}{why}, got {value}.")
    if value > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value}.")
    return value


@cache
def field_help(kind: type) -> dict[str, str]:
    """Return the string under each field of a dataclass, on one line."""
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


class IndexName(NamedTuple):
    """Tell what the name of an index says."""

    where: str
    """Its class, of `INDICES`."""
    numbers: tuple[int, ...]
    """The class's arguments."""


def parse_index(name: str) -> IndexName:
    """Read the name of an index.

    Raises:
        ValueError: no index has this name.
    """
    for form, where in INDICES.items():
        pattern = ":".join(_NUMBERS.get(word, word) for word in form.split(":"))
        match = re.fullmatch(pattern, name) if isinstance(name, str) else None
        if match:
            return IndexName(where, tuple(map(int, match.groups())))
    raise ValueError(
        f"fetch_index must be {listed(tuple(map(repr, INDICES)))}, got {name!r}."
        + did_you_mean(name, INDICES)
    )


def check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return value, or raise unless it is one of the allowed words."""
    if value not in allowed:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}."
            + did_you_mean(value, allowed)
        )
    return value


def listed(names: tuple[str, ...]) -> str:
    """Join names as a sentence does: "a, b or c"."""
    return f"{', '.join(names[:-1])} or {names[-1]}"


def did_you_mean(value: Any, names: Iterable[str]) -> str:
    """Return the hint of an error: the name nearest to a value, "" where none is near."""
    near = get_close_matches(str(value), names, 1)
    return f" Did you mean {near[0]!r}?" if near else ""


# Checks of single fields. Each raises, or returns the value in its normal form.


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}. Use 0.0 for none.")
    if not abs(value) <= float_info.max:
        raise ValueError(f"{name} must be finite, got {value}. Use 0.0 for none.")
    return value


def _tuple(name: str, value: Any, check: Callable[[str, Any], Any]) -> tuple[Any, ...]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be a tuple, got {value!r}.")
    return tuple(check(name, item) for item in value)


def _group_sizes(name: str, value: Any) -> tuple[int, ...]:
    sizes = _tuple(name, value, partial(check_int, least=1))
    if not sizes:
        raise ValueError(f"{name} must not be empty, got {sizes}.")
    return sizes


def _group_sizes_by_layer(name: str, value: Any) -> tuple[int | tuple[int, ...], ...]:
    layers = _tuple(name, value, _size_or_sizes)
    if not layers:
        raise ValueError(f"{name} must not be empty, got {layers}.")
    return layers


def _size_or_sizes(name: str, value: Any) -> int | tuple[int, ...]:
    check = _group_sizes if isinstance(value, (tuple, list)) else partial(check_int, least=1)
    return check(name, value)


def _index(name: str, value: Any) -> str:
    parse_index(value)
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "group_size": partial(check_int, least=1),
    "window_size": partial(check_int, least=1, why=" (a query sees itself)"),
    "num_groups": _optional(partial(check_int, least=1)),
    "core_position": partial(check_choice, allowed=CORE_POSITIONS),
    "core_bias": _finite,
    "layer_group_sizes": _optional(_group_sizes_by_layer),
    "sink_size": partial(check_int, least=0),
    "cache_dtype": partial(check_choice, allowed=CACHE_DTYPES),
    "head_group_sizes": _optional(_group_sizes),
    "backend": partial(check_choice, allowed=BACKENDS),
    "core_mass": _flag,
    "fetch_groups": partial(check_int, least=0),
    "fetch_index": _index,
    "fetch_share": partial(check_int, least=1),
    "store": partial(check_choice, allowed=STORES),
    "fetch_slots": partial(check_int, least=0),
    "prefill": partial(check_choice, allowed=PREFILLS),
}
