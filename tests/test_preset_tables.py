"""Tables of the presets and of rules of choosing, from made records."""

import dataclasses
import re
from pathlib import Path

import pytest

from corecontext.record import latest, make_record, read_records
from reproduction.real.choice_tables import heads_markdown
from reproduction.real.preset_tables import SAME, bytes_markdown, presets_markdown, prompts_markdown

USER = {"model": "llama3.1-8b", "length": 32768}
RECORDS = [
    make_record("user.device_bytes", 2**30, {**USER, "method": "default"}),
    make_record("user.host_bytes", 2**32, {**USER, "method": "default"}),
    make_record("user.next_token_ms", 7.0, {**USER, "method": "device"}),
    *(
        make_record(
            "real.perplexity",
            7.2,
            {
                "model": "smollm2-135m-instruct",
                "length": 8192,
                "task": "far",
                "method": method,
                "device_bytes": 23 * 2**20,
                "host_bytes": host * 2**20,
            },
        )
        for method, host in (("default", 180), ("window_of_default", 0))
    ),
]


def row_of(table, title):
    """Return the cells of a row by the titles of their columns."""
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")
    )
    (cells,) = [row for row in rows if row and row[0] == title]
    return dict(zip(head[1:], cells[1:]))


def test_a_window_has_the_bytes_of_its_preset_and_no_time_that_was_not_measured():
    row = row_of(presets_markdown(RECORDS), "a window, the bytes of `default`")
    assert row["device, SmolLM2, 8,192"] == "23.0 MiB"
    assert (row["device, 32K"], row["host, 32K"]) == ("1 GiB", "0 MiB")
    assert row["first token, 32K"] == row["next token, 32K"] == ""


@pytest.mark.parametrize("short", [False, True])
def test_a_window_that_was_measured_shows_it(short):
    values = {"user.first_token_s": 1.5, "user.next_token_ms": 6.5, "user.device_bytes": 2**31}
    window = {**USER, "method": "window:default"}
    measured = [make_record(name, value, window) for name, value in values.items()]
    table = presets_markdown(RECORDS + measured, short)
    row = row_of(table, "a window, the bytes of `default`")
    assert (row["first token, 32K"], row["next token, 32K"]) == ("1.5 s", "6.5 ms")
    assert row["device, 32K"] == "2 GiB"


def test_device_names_the_preset_that_chooses_alike_and_has_its_bytes_on_the_device():
    row = row_of(presets_markdown(RECORDS), "`device`: raw tokens on the GPU")
    assert row["gain, SmolLM2, 8,192"] == row["needles, 7,900"] == SAME
    assert (row["device, SmolLM2, 8,192"], row["host"]) == ("203.0 MiB", "0.0 MiB")
    assert (row["next token, 32K"], row["device, 32K"]) == ("7 ms", "")


def test_bytes_a_token_are_those_of_measured_caches():
    path = Path(__file__).resolve().parents[1] / "results/user.jsonl"
    records = [r for r in read_records(path) if r.params["model"] == USER["model"]]
    for method in ("default", "small"):
        row = row_of(bytes_markdown([]), f"`{method}`")
        for side in ("device", "host"):
            short, long = (
                latest(records, f"user.{side}_bytes", method=method, length=length).value
                for length in (32768, 65536)
            )
            shown = row[f"Llama-3.1-8B: {side}, a token"]
            assert int(shown.replace(",", "")) == (long - short) / 32768


def choices(value, commit, name="real.gain_kept", method="default", **params):
    """Return a record of what `default`, or another number of groups, keeps."""
    sizes = {"group_size": 32, "window_size": 160, "index": "bits:2", "fetch_groups": 64}
    place = {"model": "gemma-3-270m", "length": 8192, "trained_tokens": 0, "task": "far"}
    record = make_record(name, value, {**sizes, **place, "method": method, **params})
    return dataclasses.replace(record, commit=commit)


def test_two_rules_stand_beside_each_other_where_both_were_measured():
    records = [
        choices(0.9, "545dc5900c"),
        choices(0.95, "53040691b0"),
        choices(0.7, "53", length=1),
    ]
    records.append(choices(0.8, "545dc5900c", "real.next_gain_kept", task="next", prompt="query"))
    head, _, *rows = heads_markdown(records).splitlines()
    assert re.match(
        r"\|  \| groups \| far half, shares \| far half, largest \| last 512, sha", head
    )
    assert rows == ["| Gemma, 8,192 | 64 | 90.0 % | 95.0 % | 80.0 % |  |  |  |"]


def test_prompts_show_presets_alone():
    params = {"task": "next", "prompt": "query"}
    records = [choices(0.9, "5304", "real.next_gain_kept", **params)]
    records.append(choices(0.8, "545d", "real.next_gain_kept", "fetch", fetch_groups=32, **params))
    head, _, *rows = prompts_markdown(records).splitlines()
    assert head == "|  | preset | groups | each token's choice |"
    assert rows == ["| Gemma, 8,192 | `default` | 64 | 90.0 % |"]
