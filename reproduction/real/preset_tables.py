"""Declare the tables of the presets: two pretrained models, the groups that a query fetches, and
what prompts are worth by their reading."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.tables import (
    Column,
    Key,
    Row,
    grouped,
    key,
    newest,
    shown_bytes,
    shown_mib,
    shown_ms,
    shown_tokens,
)
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
}
SHAPE = "llama3.1-8b"
"""The model of the speeds and bytes."""
NEEDLES = (4000, 7900)
BYTES = {"device, SmolLM2, 8,192": "device_bytes", "host": "host_bytes"}
LENGTHS = (32768, 65536, 131072)
"""Tokens of the large model's texts; a table shows the shortest and the longest measured."""
PROMPTS = {
    "query": "each token's choice",
    "full": "full attention",
    "share 16": "16 share k groups",
    "share 16, 2 k": "16 share 2 k",
    "full 8192, share 16": "full to 8,192, then 16 share k",
    "full 8192, share 16, 2 k": "full to 8,192, then 16 share 2 k",
}


def presets_markdown(records: Sequence[Record], short: bool = False) -> str:
    """Return the presets beside full attention and windows of their bytes: what they keep on two
    models, and what they cost on a large one where that was measured.

    Args:
        short: With one length of needles; bytes are the large model's of the longest text alone,
            where they were measured.
    """
    records = [
        r for r in records if r.params["method"] in METHODS and not r.params.get("trained_tokens")
    ]
    needles = {"model": PLACES[0][0], "task": "needles"}
    of_user = [r for r in records if r.name.startswith("user.") and r.params["model"] == SHAPE]
    # Speeds of one device, that of the last measurement.
    records = [r for r in records if r not in of_user or r.device == of_user[-1].device]
    lengths = {r.params["length"] for r in records if r in of_user}
    measured = [length for length in LENGTHS if length in lengths]
    columns = [
        *(_gain(f"gain, {_place(*place)}", *place) for place in PLACES),
        *(
            newest(f"needles, {length:,}", "real.accuracy", _percent, **needles, length=length)
            for length in (NEEDLES[-1:] if short else NEEDLES)
        ),
    ]
    if not (short and measured):
        columns += [Column(title, partial(_mib, size=size)) for title, size in BYTES.items()]
    if measured:
        ends = sorted({measured[0], measured[-1]})
        columns += [
            newest(f"{title}, {shown_tokens(length)}", name, show, model=SHAPE, length=length)
            for title, name, show in (
                ("first token", "user.first_token_s", lambda s: shown_ms(1000 * s)),
                ("next token", "user.next_token_ms", shown_ms),
                ("device", "user.device_bytes", shown_bytes),
                ("host", "user.host_bytes", shown_bytes),
            )
            for length in (ends[-1:] if short and show is shown_bytes else ends)
        ]
    return "\n".join(grouped((_method(METHODS),), columns, records)) + "\n"


def groups_markdown(records: Sequence[Record]) -> str:
    """Return the gain by the groups that a query fetches, on two models by length."""
    records = [r for r in records if r.name == "real.gain_kept" and _is_default(r.params)]
    places = [(list(MODELS)[i], length) for i, length in sorted(set(map(_place_of, records)))]
    groups = Key("groups of 32", lambda r: r.params["fetch_groups"], "{:,}".format)
    raw = Key("raw tokens", lambda r: 32 * r.params["fetch_groups"], "{:,}".format)
    columns = [_gain(_place(*place), *place) for place in places]
    return "\n".join(grouped((groups, raw), columns, records)) + "\n"


def prompts_markdown(records: Sequence[Record]) -> str:
    """Return the gain of the last tokens of windows by the reading of the tokens before them."""
    name = "real.next_gain_kept"
    records = [r for r in records if r.name == name]
    keys = (
        Key("", _place_of, lambda at: _place(list(MODELS)[at[0]], at[1]), left=True),
        Key("preset", _preset_of, left=True),
        key("fetch_groups", "groups"),
    )
    columns = [newest(PROMPTS[prompt], name, _percent, prompt=prompt) for prompt in PROMPTS]
    return "\n".join(grouped(keys, columns, records)) + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _mib(row: Row, size: str) -> str:
    """Show the bytes of a cache of SmolLM2's windows."""
    model, length = PLACES[0]
    record = latest(row, "real.perplexity", model=model, length=length, task="far")
    return "" if record is None else shown_mib(record.params[size])


def _place(model: str, length: int) -> str:
    return f"{MODELS[model]}, {length:,}"


def _place_of(record: Record) -> tuple[int, int]:
    """Return the number of a record's model in MODELS, and its length."""
    return list(MODELS).index(record.params["model"]), record.params["length"]


def _method(titles: dict[str, str]) -> Key:
    names = list(titles)
    return Key("", lambda r: names.index(r.params["method"]), lambda i: titles[names[i]], left=True)


def _gain(title: str, model: str, length: int) -> Column:
    """Return the column of a model's gains at a length; full attention's is 100 % by definition."""
    column = newest(title, "real.gain_kept", _percent, model=model, length=length, task="far")

    def cell(row: Row) -> str:
        return "100 %" if row[0].params["method"] == "full" else column.cell(row)

    return column._replace(cell=cell)


def _is_default(params: dict[str, Any]) -> bool:
    """Whether a row of MODELS differs from `default` by its number of groups alone."""
    default = PRESETS["default"]
    names = {"group_size": "group_size", "window_size": "window_size", "index": "fetch_index"}
    is_untrained = params["model"] in MODELS and not params["trained_tokens"]
    return is_untrained and all(
        params[name] == getattr(default, field) for name, field in names.items()
    )


def _preset_of(record: Record) -> str:
    method = record.params["method"]
    return f"`{method}`" if method in PRESETS else "`default`, other groups"
