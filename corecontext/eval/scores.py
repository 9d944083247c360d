"""Scores of one answer, between 0 and 1. What each benchmark does to answers and references is said
with its metric."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from corecontext.files import UserError

Metric = Callable[[str, str], float]
_ARTICLES, _PUNCTUATION = re.compile(r"\b(a|an|the)\b"), set(string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single blanks (SQuAD's convention)."""
    kept = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", kept).split())


def contains_answer(answer: str, references: Sequence[str]) -> float:
    """1 if a normalised reference occurs in the normalised first line of the answer (multi-document
    QA)."""
    line = normalise(answer.split("\n")[0].strip())
    return float(any(normalise(one) in line for one in references))


def match_all(answer: str, references: Sequence[str]) -> float:
    """Fraction of references that occur in the answer, whatever their case (RULER)."""
    low = _readable(answer)
    return sum(one.lower() in low for one in references) / len(references)


def match_any(answer: str, references: Sequence[str]) -> float:
    """1 if any reference occurs in the answer, whatever its case (RULER's questions)."""
    low = _readable(answer)
    return float(any(one.lower() in low for one in references))


def _readable(answer: str) -> str:
    """Stripped lower case, control characters as line breaks."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()


def token_f1(answer: str, reference: str) -> float:
    """F1 of the two bags of normalised words."""
    given, wanted = normalise(answer).split(), normalise(reference).split()
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def rouge_l(answer: str, reference: str) -> float:
    """Rouge-L's f of the package `rouge`; 0 where that refuses the answer (an empty one)."""
    try:
        from rouge import Rouge
    except ImportError:
        raise UserError(
            "Rouge needs the package rouge. Install it: pip install 'corecontext[eval]'."
        ) from None
    try:
        return float(Rouge().get_scores([answer], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the answer) if the right one is among them.

    Names that are part of the right one are dropped while the list is walked, so of two neighbours
    the second stays: LongBench does it so, and its published scores contain it.
    """
    found = [one for one in classes if one in answer]
    for one in found:
        if one in reference and one != reference:
            found.remove(one)
    return 1 / len(found) if reference in found else 0.0


def number_match(answer: str, reference: str) -> float:
    """Of all whole numbers in the answer, the fraction that is the reference's first number."""
    wanted = re.search(r"\d+", reference)
    numbers = re.findall(r"\d+", answer)
    if not numbers or wanted is None:
        return 0.0
    return sum(one == wanted[0] for one in numbers) / len(numbers)


def edit_similarity(answer: str, reference: str) -> float:
    """Similarity in whole hundredths of the reference and the first line of code that is no comment
    or fence."""
    lines = answer.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100
