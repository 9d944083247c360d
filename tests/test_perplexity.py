"""Perplexity of a document: its parts, its records and the lines of its table."""

import math
from types import SimpleNamespace

import pytest
import torch

from corecontext import perplexity
from corecontext.files import UserError
from corecontext.integrations.hf.cache_name import with_cache
from corecontext.perplexity import Perplexity, document_nll, measure, print_table, to_records

NLL = torch.cat((torch.full((511,), 1.0), torch.full((512,), 2.0), torch.full((176,), 3.0)))
"""Of 1200 tokens: three buckets of a loss each."""


def test_each_bucket_has_the_mean_of_its_own_losses():
    buckets = Perplexity(NLL, 1).by_position()
    assert buckets == [
        (0, 512, pytest.approx(math.exp(1))),
        (512, 1024, pytest.approx(math.exp(2))),
        (1024, 1200, pytest.approx(math.exp(3))),
    ]
    uneven = Perplexity(torch.tensor([0.0, 0.0, 3.0]), 1).by_position()
    assert uneven == [(0, 4, pytest.approx(math.exp(1)))]


def a_model(ids: torch.Tensor, **_) -> SimpleNamespace:
    return SimpleNamespace(logits=torch.zeros(1, ids.shape[1], 5), **with_cache(None))


def test_progress_counts_every_token_once():
    done = []
    document_nll(a_model, torch.zeros(1, 10, dtype=torch.long), chunk_size=4, on_chunk=done.append)
    assert done == [4, 4, 2]


@pytest.mark.parametrize(
    "num_groups, given, used", [(None, None, 1024), (None, 7, 7), (3, None, 5), (3, 7, None)]
)
def test_a_text_is_measured_with_its_bytes_sizes_and_notes(monkeypatch, num_groups, given, used):
    chunks = []

    def nll(model, ids, *, chunk_size, on_chunk):
        chunks.append(chunk_size)
        return torch.ones(ids.shape[1] - 1)

    monkeypatch.setattr(perplexity, "document_nll", nll)
    loaded = SimpleNamespace(
        model=SimpleNamespace(device="cpu"),
        tokenizer=lambda text, **_: {"input_ids": torch.zeros(1, len(text), dtype=torch.long)},
        max_length=None,
        config=SimpleNamespace(num_groups=num_groups),
        adapted=False,
        sizes=lambda: {"layers": 2},
        idle_note=lambda length: f"idle at {length}",
    )
    if used is None:
        with pytest.raises(UserError, match="chunk-size must not be given with num-groups"):
            measure(loaded, "na\u00efve", "cca", given)
        return
    result = measure(loaded, "na\u00efve", "cca", given)
    assert chunks == [used]
    assert result.num_bytes == 6
    assert (result.sizes, result.idle, result.adapted) == ({"layers": 2}, "idle at 5", False)


def test_records_hold_the_whole_its_bits_and_each_bucket():
    result = Perplexity(NLL, 2000, {"window_size": 8})
    records = to_records({"cca sinks=16": result}, "some/folder/model")
    params = {"method": "cca", "model": "model", "task": "document", "length": 1200}
    assert [(r.name, r.value, r.params.get("bucket")) for r in records] == [
        ("quality.perplexity", result.value, None),
        ("quality.bits_per_byte", result.bits_per_byte, None),
        ("quality.perplexity", pytest.approx(math.exp(1)), "0-511"),
        ("quality.perplexity", pytest.approx(math.exp(2)), "512-1023"),
        ("quality.perplexity", pytest.approx(math.exp(3)), "1024-1199"),
    ]
    for record in records:
        assert params.items() <= record.params.items()
        assert record.params["window_size"] == 8


def result(loss: float, **fields) -> Perplexity:
    sizes = {"window_size": 3, **fields.pop("sizes", {})}
    losses = torch.tensor([0.5, 0.5, loss, loss, loss])
    return Perplexity(losses, 10, sizes, **fields)


def lines(capsys, results: dict[str, Perplexity]) -> list[str]:
    print_table(results)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_table_compares_with_full_attention(capsys):
    results = {"full": result(1.0), "cca": result(1.1), "window": result(2.0)}
    shown = lines(capsys, results)
    assert "perplexity of 6 tokens, 10 bytes" in shown
    assert "positions full attention CCA difference window" in shown
    values = [f"{x.value:.4f}" for x in results.values()]
    assert f"all {values[0]} {values[1]} +6.2 % {values[2]}" in shown
    bits = [f"{x.bits_per_byte:.4f}" for x in results.values()]
    assert any(line.startswith(f"bits per byte {bits[0]} {bits[1]} +") for line in shown)
    assert f"0 - 5 {values[0]} {values[1]} +6.2 % {values[2]}" in shown
    assert "positions from 3 on: CCA +10.5 %, window +171.8 %" in shown


@pytest.mark.parametrize(
    "fields, last",
    [
        ({"adapted": False}, "not adapted: try --sinks 16; corecontext train"),
        (
            {"adapted": False, "sizes": {"sinks": 4}},
            "not adapted: try corecontext train",
        ),
        ({}, "positions from 3 on: CCA +10.5 %"),
        ({"idle": "CCA was idle.", "adapted": False}, "CCA was idle."),
    ],
    ids=str,
)
def test_the_last_line_says_the_next_step(capsys, fields, last):
    assert lines(capsys, {"full": result(1.0), "cca": result(1.1, **fields)})[-1] == last


def test_a_note_of_several_methods_comes_once(capsys):
    note = "window was idle."
    shown = lines(capsys, {"window": result(1.0, idle=note), "mean": result(1.0, idle=note)})
    assert shown.count(note) == 1
    assert not any(line.startswith(("positions from", "not adapted")) for line in shown)
