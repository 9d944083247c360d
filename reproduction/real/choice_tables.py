"""Declare the tables of rules of choosing groups, on two pretrained models."""

from collections.abc import Sequence
from typing import Any

from benchmarks.tables import Column, Key, Row, grouped, markdown, newest, rows_by
from corecontext.record import Record, latest
from reproduction.real.preset_tables import MODELS, PLACES, group_keys, is_default

RULES = {
    "per_head": "each KV head, k = {fetch_groups}",
    "one_a_layer": "one for all KV heads, by the sum of shares, k = {fetch_groups}",
    "largest_a_layer": "one for all KV heads, by the largest score, k = {fetch_groups}",
    "adaptive": "each KV head, shares of at least {threshold}, k = {fetch_groups} at most",
    "two_levels": "each KV head, of {candidates:.0f} groups by mean keys, k = {fetch_groups}",
}
"""Methods in words, in the order of the table."""
NAME = "choices.gain_kept"
SHARES = ("545dc590", "d6aec4f8", "4884b04c")
"""Commits whose queries chose by shares: a softmax of each query head over the groups, from the
masses by the index, and the largest sums over the heads of a KV head."""
BY_HEADS = {
    "far half": {"name": "real.gain_kept", "task": "far"},
    "last 512": {"name": "real.next_gain_kept", "prompt": "query"},
    "last 512, 16 share k": {"name": "real.next_gain_kept", "prompt": "share 16"},
}
"""Name and params of the records of each column of the table of two rules."""


def choices_markdown(records: Sequence[Record]) -> str:
    """Return the gain kept by each rule, beside the groups that a query reads of a KV head."""
    rows = rows_by([Key("", _place)], (r for r in records if r.name == NAME))
    columns = [Column("choice", _rule, left=True)]
    for model, length in PLACES:
        title = f"{MODELS[model]}, {length:,}"
        where = {"model": model, "length": length}
        columns.append(_groups(f"groups, {title}", where))
        columns.append(newest(f"gain, {title}", NAME, lambda x: f"{100 * x:.1f} %", **where))
    return "\n".join(markdown(columns, rows)) + "\n"


def heads_markdown(records: Sequence[Record]) -> str:
    """Return the gain of `default`, and of other numbers of groups, by two rules of choosing: the
    shares that the package had, and the largest score, which it has."""
    names = {where["name"] for where in BY_HEADS.values()}
    records = [r for r in records if r.name in names and is_default(r.params)]
    places = {_where(r) for r in records if _is_by_shares(r)}
    columns = [
        _by_heads(f"{title}, {rule}", by_shares, **where)
        for title, where in BY_HEADS.items()
        for rule, by_shares in (("shares", True), ("largest", False))
    ]
    return (
        "\n".join(grouped(group_keys(), columns, (r for r in records if _where(r) in places)))
        + "\n"
    )


def _where(record: Record) -> tuple[Any, ...]:
    return tuple(record.params[name] for name in ("model", "length", "fetch_groups"))


def _is_by_shares(record: Record) -> bool:
    return (record.commit or "").startswith(SHARES)


def _by_heads(title: str, by_shares: bool, **where: Any) -> Column:
    """Return the column of the newest gains by one of the two rules."""
    column = newest(title, show=lambda x: f"{100 * x:.1f} %", **where)

    def cell(row: Row) -> str:
        return column.cell([r for r in row if _is_by_shares(r) is by_shares])

    return column._replace(cell=cell)


def _place(record: Record) -> tuple[float, ...]:
    """Return the values by which rules are told apart and sorted."""
    p = record.params
    settings = p.get("threshold", 0), -p.get("candidates", 0)
    return list(RULES).index(p["method"]), -p["fetch_groups"], *settings


def _rule(row: Row) -> str:
    return RULES[row[0].params["method"]].format(**row[0].params)


def _groups(title: str, where: dict[str, Any]) -> Column:
    """Return the column of the mean number of groups of a model and length."""

    def cell(row: Row) -> str:
        record = latest(row, NAME, **where)
        return "" if record is None else f"{record.params['mean_groups']:.1f}"

    return Column(title, cell)
