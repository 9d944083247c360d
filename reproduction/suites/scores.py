"""Score an answer between 0 and 1; each metric states how its benchmark treats answers and
references."""

import difflib
import importlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from corecontext.eval.multidoc_qa import normalise
from corecontext.files import UserError

Metric = Callable[[str, str], float]


def match_all(answer: str, references: Sequence[str]) -> float:
    """Return the fraction of references that occur in the answer, in any case (RULER)."""
    text = _plain(answer)
    return sum(reference.lower() in text for reference in references) / len(references)


def match_any(answer: str, references: Sequence[str]) -> float:
    """Return 1 if any reference occurs in the answer, in any case (RULER's questions)."""
    text = _plain(answer)
    # mutant eval: references match in their own case only
    return float(any(reference.lower() in text for reference in references))


def _plain(answer: str) -> str:
    """Return stripped lower case, with control characters as line breaks."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip().lower()


def token_f1(answer: str, reference: str) -> float:
    """Return the F1 of the two bags of normalised words."""
    given = normalise(answer).split()
    wanted = normalise(reference).split()
    # mutant eval: F1 of words without their counts
    common = sum((Counter(given) & Counter(wanted)).values())
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def import_rouge() -> Any:
    """Return the package `rouge`, or raise a UserError that says how to install it."""
    try:
        return importlib.import_module("rouge")
    except ImportError:
        raise UserError("Rouge needs the package rouge. Install it: pip install rouge.") from None


def rouge_l(answer: str, reference: str) -> float:
    """Return Rouge-L's f of the package `rouge`; 0 where it refuses the answer (an empty one)."""
    rouge = import_rouge().Rouge()
    try:
        return float(rouge.get_scores([answer], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """Return 1 / (number of classes named in the answer) if the right class is among them.

    Classes that are part of the right one are removed while the list is traversed, so the second of
    two neighbours stays: LongBench does the same, and its published scores depend on it.
    """
    named = [name for name in classes if name in answer]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def number_match(answer: str, reference: str) -> float:
    """Return the fraction of the answer's whole numbers that equal the reference's first number."""
    wanted = re.search(r"\d+", reference)
    numbers = re.findall(r"\d+", answer)
    if not numbers or wanted is None:
        return 0.0
    return sum(number == wanted[0] for number in numbers) / len(numbers)


def edit_similarity(answer: str, reference: str) -> float:
    """Return the similarity, in whole hundredths, of the reference and the first line of code that
    is no comment or fence."""
    code = ""
    for line in answer.lstrip("\n").split("\n"):
        if not any(mark in line for mark in ("`", "#", "//")):
            code = line
            break
    # mutant eval: edit similarity not in whole hundredths
    return round(100 * difflib.SequenceMatcher(None, code, reference).ratio()) / 100
