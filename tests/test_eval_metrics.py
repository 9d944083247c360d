"""Each metric on answers whose score is known."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from corecontext.eval import scores


@pytest.mark.parametrize(
    "answer, references, score",
    [
        ("The Beatles!", ["beatles"], 1),
        ("It was  the\tBeatles", ["The Beatles", "x"], 1),
        ("Stones", ["Beatles"], 0),
        ("no\nBeatles", ["Beatles"], 0),
        ("  beatles\nno", ["Beatles"], 1),
        ("", ["Beatles"], 0),
        ("\nBeatles", ["Beatles"], 0),
        ("See an owl, a cat; the dog's", ["see owl cat dogs"], 1),
        ("cat", ["the cat sat"], 0),
        ("theatre", ["atre"], 1),
        ("a-b", ["ab"], 1),
    ],
)
def test_contains_answer(answer, references, score):
    assert scores.contains_answer(answer, references) == score


def test_ruler_matches():
    assert scores.match_all(" 12 and AB\x00c", ["12", "ab", "9", "x"]) == 0.5
    assert scores.match_all("ab\x1fc", ["ab\nc", "abc"]) == 0.5
    assert scores.match_all("1 2", ["1", "2"]) == 1 and scores.match_all("", ["1"]) == 0
    assert (
        scores.match_any("the Answer", ["answer", "x"]) == 1
        and scores.match_any("no", ["answer", "x"]) == 0
    )


def test_token_f1():
    assert scores.token_f1("The cat sat.", "a cat sat") == 1
    assert scores.token_f1("cat dog", "cat") == pytest.approx(2 / 3)
    assert scores.token_f1("cat cat", "cat cat bird bird") == pytest.approx(2 / 3)
    assert scores.token_f1("dog", "cat") == 0 and scores.token_f1("", "cat") == 0


def test_rouge_l_is_the_f_of_the_package(monkeypatch):
    def get_scores(self, answers, references, avg):
        assert (answers, references, avg) == (["an answer"], ["a reference"], True)
        part = {"r": 0.9, "p": 0.1, "f": 0.5}
        return {"rouge-1": dict.fromkeys(part, 0.2), "rouge-l": part}

    package = SimpleNamespace(Rouge=type("Rouge", (), {"get_scores": get_scores}))
    monkeypatch.setitem(sys.modules, "rouge", package)
    assert scores.rouge_l("an answer", "a reference") == 0.5

    def too_deep(self, answers, references, avg):
        raise RecursionError

    package.Rouge.get_scores = too_deep  # of long answers
    assert scores.rouge_l("an answer", "a reference") == 0


def test_rouge_l():
    pytest.importorskip("rouge")
    assert scores.rouge_l("the cat sat down", "the cat sat down") == pytest.approx(1)
    assert scores.rouge_l("the cat sat down", "the dog sat up") == pytest.approx(0.5, abs=1e-6)
    assert scores.rouge_l("x", "the cat") == 0 and scores.rouge_l("", "the cat") == 0


def test_classification_keeps_the_quirk():
    classes = ["City", "City in a country", "Other"]
    assert scores.classification("City in a country", "City in a country", classes) == 1
    assert scores.classification("City in a country, Other", "City in a country", classes) == 0.5
    assert (
        scores.classification("Other", "City", classes) == 0
        and scores.classification("", "City", classes) == 0
    )
    nested = ["a", "ab", "abc"]  # dropping "a" while walking skips "ab"
    assert scores.classification("abc", "abc", nested) == 0.5


def test_number_match():
    assert scores.number_match("Paragraph 12", "Paragraph 12") == 1
    assert scores.number_match("12 or 3", "Paragraph 12") == 0.5
    assert scores.number_match("none", "3") == 0 and scores.number_match("30", "3") == 0
    assert scores.number_match("7", "7 of 30") == 1 and scores.number_match("30", "7 of 30") == 0
    assert scores.number_match("7", "none") == 0 and scores.number_match("3 3 4", "3") == 2 / 3


def test_edit_similarity():
    assert scores.edit_similarity("\n# comment\n```\nreturn x\nmore", "return x") == 1
    assert scores.edit_similarity("abcd", "abxx") == 0.5
    assert scores.edit_similarity("// a\nuse `x`\nx = 1 # b\ny\nz", "y") == 1
    assert scores.edit_similarity("\n\n# only\n# comments", "comments") == 0
    assert scores.edit_similarity("", "abc") == 0 and scores.edit_similarity("zzz", "abc") == 0
