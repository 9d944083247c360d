"""Declare the tables of the presets: two pretrained models, the groups that a query fetches, what
prompts are worth by their reading, and bytes a token."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.tables import (
    Column,
    Key,
    Row,
    grouped,
    key,
    markdown,
    newest,
    shown_bytes,
    shown_mib,
    shown_ms,
    shown_tokens,
)
from corecontext.config import CCAConfig
from corecontext.cost import CacheBytes, ModelCost
from corecontext.record import Record, latest
from reproduction.real.methods import PRESETS

MODELS = {"smollm2-135m-instruct": "SmolLM2", "gemma-3-270m": "Gemma"}
PLACES = (("smollm2-135m-instruct", 8192), ("gemma-3-270m", 8192), ("gemma-3-270m", 16384))
"""Models, and the tokens of their windows, that the presets were chosen by."""
METHODS = {
    "full": "full attention",
    "default": "`default`",
    "window_of_default": "a window, the bytes of `default`",
    "small": "`small`",
    "window_of_small": "a window, the bytes of `small`",
    "device": "`device`: raw tokens on the GPU",
}
"""Rows of the table; `device` chooses as `default` does, so its quality is not measured again."""
SPEED_NAMES = {"window:default": "window_of_default", "window:small": "window_of_small"}
"""Rows by the names that `python -m benchmarks user` gives their methods."""
PRESET_OF = {"window_of_default": "default", "window_of_small": "small"}
"""Presets by the row of a window that has their bytes on the device."""
SAME = "as `default`"
SHAPE = "llama3.1-8b"
"""The model of the speeds and bytes."""
NEEDLES = (4000, 7900)
BYTES = {"device, SmolLM2, 8,192": "device_bytes", "host": "host_bytes"}
LENGTHS = (32768, 65536, 131072)
"""Tokens of the large model's texts; a table shows the shortest and the longest measured."""
SIZES = {
    "Llama-3.1-8B": ModelCost(32, 32, 8, 128, 0, 0),
    "SmolLM2-135M": ModelCost(30, 9, 3, 64, 0, 0),
    "Gemma-3-270M": ModelCost(3, 4, 1, 256, 0, 0, windows=(512,) * 15),
}
"""Models of the table of bytes, with numbers of 16 bits; weights do not count."""
PROMPTS = {
    "query": "each token's choice",
    "full": "full attention",
    "share 16": "16 share k groups",
    "share 16, 2 k": "16 share 2 k",
    "full 8192, share 16": "full to 8,192, then 16 share k",
    "full 8192, share 16, 2 k": "full to 8,192, then 16 share 2 k",
    "share 8, 2 k": "8 share 2 k",
    "share 32, 2 k": "32 share 2 k",
    "share 16, 2 k, largest": "16 share 2 k, by the largest score",
    "share 16, 2 k, shares": "16 share 2 k, by shares",
}
"""Titles of the ways in which prompts are read; those without a record have no column."""


def presets_markdown(records: Sequence[Record], short: bool = False) -> str:
    """Return the presets beside full attention and windows of their bytes: what they keep on two
    models, and what they cost on a large one where that was measured. A window has the bytes of its
    preset on the device, and none in host memory, where they were not measured.

    Args:
        short: With one length of needles; bytes are the large model's of the longest text alone,
            where they were measured.
    """
    records = [r for r in records if _name(r) in METHODS and not r.params.get("trained_tokens")]
    needles = {"model": PLACES[0][0], "task": "needles"}
    of_user = [r for r in records if _is_of_user(r)]
    # Speeds of one device, that of the last measurement.
    records = [r for r in records if not _is_of_user(r) or r.device == of_user[-1].device]
    lengths = {r.params["length"] for r in of_user if r.device == of_user[-1].device}
    measured = [length for length in LENGTHS if length in lengths]
    columns = [
        *(_gain(f"gain, {_place(*place)}", *place) for place in PLACES),
        *(
            newest(f"needles, {length:,}", "real.accuracy", _percent, **needles, length=length)
            for length in (NEEDLES[-1:] if short else NEEDLES)
        ),
    ]
    columns = [_as_default(column) for column in columns]
    if not (short and measured):
        columns += [
            Column(title, partial(_mib, size=size, records=records))
            for title, size in BYTES.items()
        ]
    if measured:
        ends = sorted({measured[0], measured[-1]})
        columns += [
            _of_user(f"{title}, {shown_tokens(length)}", name, show, length, records)
            for title, name, show in (
                ("first token", "user.first_token_s", lambda s: shown_ms(1000 * s)),
                ("next token", "user.next_token_ms", shown_ms),
                ("device", "user.device_bytes", shown_bytes),
                ("host", "user.host_bytes", shown_bytes),
            )
            for length in (ends[-1:] if short and show is shown_bytes else ends)
        ]
    return "\n".join(grouped((_method(METHODS),), columns, records)) + "\n"


def _is_of_user(record: Record) -> bool:
    """Whether a record is a measurement of what a user meets, on the large model."""
    return record.name.startswith("user.") and record.params["model"] == SHAPE


def bytes_markdown(records: Sequence[Record]) -> str:
    """Return the bytes of each preset's cache by arithmetic, without any record: those of a token,
    in a text of at most 81,920, and those that do not grow with it."""
    configs = {"full attention": CCAConfig.paper(group_size=1, window_size=1)}
    configs |= {f"`{name}`": CCAConfig.preset(name) for name in ("default", "small", "device")}
    columns = [Column("", lambda row: row[0], left=True)]
    for model, cost in SIZES.items():
        for title, show in (
            ("device, a token", lambda growth, fixed: f"{growth.device:,.0f}"),
            ("host, a token", lambda growth, fixed: f"{growth.host:,.0f}"),
            ("device, besides", lambda growth, fixed: shown_mib(fixed)),
        ):
            columns.append(
                Column(
                    f"{model}: {title}",
                    lambda row, cost=cost, show=show: show(*_growth(cost, row[1])),  # type: ignore[misc]
                )
            )
    return "\n".join(markdown(columns, configs.items())) + "\n"


def _growth(cost: ModelCost, config: CCAConfig) -> tuple[CacheBytes, int]:
    """Return the bytes that a cache on a GPU takes for each token, and those on the device that do
    not grow with the text: window, first tokens, slots, sliding-window layers."""
    short, long = LENGTHS[:2]
    config = config.replace(fetch_slots=config.slots_for(long, on_gpu=True))
    least, most = (cost.config_bytes(config, length) for length in (short, long))
    device, host = ((more - less) / (long - short) for less, more in zip(least, most))
    return CacheBytes(round(device), round(host)), round(most.device - device * long)


def groups_markdown(records: Sequence[Record]) -> str:
    """Return the gain by the groups that a query fetches, on two models by length."""
    records = [r for r in records if r.name == "real.gain_kept" and is_default(r.params)]
    places = [(list(MODELS)[i], length) for i, length in sorted(set(map(_place_of, records)))]
    groups = Key("groups of 32", lambda r: r.params["fetch_groups"], "{:,}".format)
    raw = Key("raw tokens", lambda r: 32 * r.params["fetch_groups"], "{:,}".format)
    columns = [_gain(_place(*place), *place) for place in places]
    return "\n".join(grouped((groups, raw), columns, records)) + "\n"


def group_keys() -> tuple[Key, ...]:
    """Return the columns of a model, the tokens of its windows and the groups of a query."""
    return (_place_key(), key("fetch_groups", "groups"))


def prompts_markdown(records: Sequence[Record]) -> str:
    """Return the gain of the last tokens of windows by the reading of the tokens before them. Other
    groups than the presets' were measured by an earlier rule (`choice_tables.heads_markdown`)."""
    name = "real.next_gain_kept"
    records = [r for r in records if r.name == name and r.params["method"] in PRESETS]
    keys = (_place_key(), Key("preset", _preset_of, left=True), key("fetch_groups", "groups"))
    measured = {r.params["prompt"] for r in records}
    columns = [
        newest(title, name, _percent, prompt=prompt)
        for prompt, title in PROMPTS.items()
        if prompt in measured
    ]
    return "\n".join(grouped(keys, columns, records)) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _name(record: Record) -> str:
    """Return the row's name of a record's method."""
    return SPEED_NAMES.get(record.params["method"], record.params["method"])


def _mib(row: Row, size: str, records: Sequence[Record]) -> str:
    """Show the bytes of a cache of SmolLM2's windows. Those of `device` are arithmetic: what
    `default` has on both sides is on the device."""
    model, length = PLACES[0]
    place = {"model": model, "length": length, "task": "far"}
    record = latest(row, "real.perplexity", **place)
    if record is not None:
        return shown_mib(record.params[size])
    record = latest(records, "real.perplexity", **place, method="default")
    if _name(row[0]) != "device" or record is None:
        return ""
    both = sum(record.params[each] for each in BYTES.values())
    return shown_mib(both if size == "device_bytes" else 0)


def _of_user(
    title: str, name: str, show: Callable[[float], str], length: int, records: Sequence[Record]
) -> Column:
    """Return the column of what a user waits for, or of bytes, at a length of the large model."""
    measured = newest(title, name, show, model=SHAPE, length=length)

    def cell(row: Row) -> str:
        text = measured.cell(row)
        preset = PRESET_OF.get(_name(row[0]))
        if text or preset is None or not name.endswith("_bytes"):
            return text
        where = {"model": SHAPE, "length": length, "method": preset}
        record = latest(records, "user.device_bytes", **where)
        if record is None:
            return ""
        return show(record.value if name == "user.device_bytes" else 0)

    return Column(title, cell)


def _as_default(column: Column) -> Column:
    """Return a column of quality whose cell of `device` names the preset that chooses alike."""

    def cell(row: Row) -> str:
        return SAME if _name(row[0]) == "device" else column.cell(row)

    return column._replace(cell=cell)


def _place(model: str, length: int) -> str:
    return f"{MODELS[model]}, {length:,}"


def _place_of(record: Record) -> tuple[int, int]:
    """Return the number of a record's model in MODELS, and its length."""
    return list(MODELS).index(record.params["model"]), record.params["length"]


def _place_key() -> Key:
    return Key("", _place_of, lambda at: _place(list(MODELS)[at[0]], at[1]), left=True)


def _method(titles: dict[str, str]) -> Key:
    names = list(titles)
    return Key("", lambda r: names.index(_name(r)), lambda i: titles[names[i]], left=True)


def _gain(title: str, model: str, length: int) -> Column:
    """Return the column of a model's gains at a length; full attention's is 100 % by definition."""
    column = newest(title, "real.gain_kept", _percent, model=model, length=length, task="far")

    def cell(row: Row) -> str:
        return "100 %" if _name(row[0]) == "full" else column.cell(row)

    return column._replace(cell=cell)


def is_default(params: dict[str, Any]) -> bool:
    """Return whether settings of a model of MODELS differ from `default` by the groups alone."""
    default = PRESETS["default"]
    names = {"group_size": "group_size", "window_size": "window_size", "index": "fetch_index"}
    is_untrained = params["model"] in MODELS and not params["trained_tokens"]
    return is_untrained and all(
        params[name] == getattr(default, field) for name, field in names.items()
    )


def _preset_of(record: Record) -> str:
    return f"`{record.params['method']}`"
