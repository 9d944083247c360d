"""Declare the table of rules of choosing groups, on two pretrained models."""

from collections.abc import Sequence
from typing import Any

from benchmarks.tables import Column, Key, Row, markdown, newest, rows_by
from corecontext.record import Record, latest
from reproduction.real.preset_tables import MODELS, PLACES

RULES = {
    "per_head": "each KV head, k = {fetch_groups}",
    "one_a_layer": "one for all KV heads, by the sum of shares, k = {fetch_groups}",
    "largest_a_layer": "one for all KV heads, by the largest score, k = {fetch_groups}",
    "adaptive": "each KV head, shares of at least {threshold}, k = {fetch_groups} at most",
    "two_levels": "each KV head, of {candidates:.0f} groups by mean keys, k = {fetch_groups}",
}
"""Methods in words, in the order of the table."""
NAME = "choices.gain_kept"


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
