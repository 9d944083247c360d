"""How quality is counted: which token belongs to a bucket, what a mean is over, what pages may
hold."""

import json
import math
from html.parser import HTMLParser

import pytest
import torch

from corecontext.eval import windows
from corecontext.eval.combine import perplexities
from corecontext.eval.inspect.page import make_page
from corecontext.eval.items import Settings, Window
from corecontext.perplexity import Perplexity
from corecontext.record import make_record

HOSTILE = ("</script>", "<!--", "\u2028", "<script>alert(1)</script>", "]]>", '"', "&amp;")


@pytest.mark.parametrize("position", [1, 511, 512, 1023, 1024, 2047, 2048, 2998, 2999])
def test_a_token_belongs_to_the_bucket_of_its_position(position):
    nll = torch.zeros(2999)
    nll[position - 1] = 5.0  # entry t is the loss of token t + 1
    sums = {
        (start, end): float(losses.sum()) for start, end, losses in Perplexity(nll, 1).buckets()
    }
    assert list(sums) == [(0, 512), (512, 1024), (1024, 2048), (2048, 3000)]
    assert sums == {bucket: 5.0 * (bucket[0] <= position < bucket[1]) for bucket in sums}


class Words:
    """A subject whose tokens are characters, each with a loss of its own."""

    limit = None

    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def nll(self, ids):
        return torch.tensor(ids[1:]) / 1000


def test_positions_from_one_on_are_those_that_the_window_does_not_hold():
    losses = Perplexity(torch.arange(1.0, 10.0) / 100, 10)  # of tokens 1 to 9
    assert losses.from_position(0) == losses.from_position(1) == pytest.approx(losses.value)
    assert losses.from_position(8) == pytest.approx(math.exp(0.085))


def test_windows_and_their_buckets_hold_every_loss_once():
    outcome = Window("w", {}, list(range(700)), 700).run(Words())
    first, second = outcome.details["buckets"]
    assert first == [0, 512, pytest.approx(sum(range(1, 512)) / 1000), 511]
    assert second == [512, 700, pytest.approx(sum(range(512, 700)) / 1000), 188]
    assert outcome.details["nll"] == pytest.approx(first[2] + second[2])
    assert outcome.value == pytest.approx(math.exp(sum(range(1, 700)) / 1000 / 699))


def test_perplexity_of_several_windows_is_that_of_all_their_tokens():
    records = [
        make_record(
            "quality.perplexity",
            math.exp(nll / tokens),
            {"nll": nll, "tokens": tokens, "domain": "d", "buckets": [[0, 512, nll, tokens]]},
        )
        for nll, tokens in ((10.0, 10), (900.0, 300))
    ]
    expected = (pytest.approx(math.exp(910 / 310)), 310)
    assert perplexities(records) == dict.fromkeys(("", "d", "0-511"), expected)


def test_bytes_are_those_of_utf8(tmp_path):
    text = "d\u00e9j\u00e0 vu \u20ac5 \U0001f600 " * 4
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    length = len(text) // 2
    items = windows.items(tmp_path / "text.txt", Settings(lengths=(length,)), Words())
    size = len(text.encode())
    assert size > len(text)
    assert sum(item.num_bytes for item in items) == size
    bits = Perplexity(torch.ones(size), size).bits_per_byte
    assert bits == pytest.approx(1 / math.log(2))


class Bytes(Words):
    """A subject whose tokens are bytes."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("length", [4, 6, 11, 12, 33])
def test_a_character_that_an_edge_cuts_counts_once(tmp_path, length):
    text = "a\u20ac\U0001f600b\u00e9" * 12  # 1, 3, 4, 1 and 2 bytes
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    items = windows.items(tmp_path / "text.txt", Settings(lengths=(length,)), Bytes())
    assert len(items) * length == len(text.encode()) == sum(item.num_bytes for item in items)


class Scripts(HTMLParser):
    """Collects a page's scripts, comments and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts, self.comments, self.text, self.inside = [], [], "", ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_comment(self, data):
        self.comments.append(data)

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def test_no_text_ends_the_script_of_an_inspected_page():
    page = make_page(HOSTILE[0], HOSTILE, [0], [], {"model": "".join(HOSTILE)})
    parsed = Scripts(page)
    assert len(parsed.scripts) == 1 and not parsed.comments
    assert not {"\u2028", "\u2029"} & set(page)
    line = next(line for line in page.split("\n") if line.startswith("const data = "))
    data = json.loads(line.removeprefix("const data = ").removesuffix(";"))
    assert data["tokens"] == list(HOSTILE) and data["settings"]["model"] == "".join(HOSTILE)
    assert line in parsed.scripts[0] and not any(mark in line for mark in ("<", "\u2028"))


def test_no_record_ends_the_script_of_a_report():
    from reproduction.html_page import SCRIPT, Page  # not in the copies that faults are planted in

    records = [make_record("quality.score", 0.5, {"model": text}) for text in HOSTILE]
    report = Page(records)
    report.section("x", "".join(HOSTILE), report.cell(records[0]))
    parsed = Scripts(report.render(HOSTILE[0]))
    assert parsed.scripts == [SCRIPT] and not parsed.comments
    assert all(record.to_json() in parsed.text for record in records)
    assert "".join(HOSTILE) in parsed.text
