"""Synthetic retrieval: facts planted in real text, and the line at its end that asks for each of
them.

A question repeats the beginning of the fact's sentence after "Recall:", and the answer is how the
sentence went on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("place", "value", "passkey")

_TITLES = ("Dr", "Mr", "Mrs", "Miss", "Captain", "Professor", "Judge", "Lady")
_SURNAMES = (
    "Harlow",
    "Bennett",
    "Carver",
    "Dalton",
    "Everett",
    "Fisher",
    "Granger",
    "Hollis",
    "Ingram",
    "Jarvis",
    "Keller",
    "Lambert",
    "Mercer",
    "Norwood",
    "Osborne",
    "Palmer",
    "Quincy",
    "Redmond",
    "Sawyer",
    "Thorne",
    "Upton",
    "Vaughan",
    "Whitaker",
    "Yardley",
    "Ashby",
    "Blackwood",
    "Corbett",
    "Drummond",
    "Ellison",
    "Farrell",
    "Gibbs",
    "Hartley",
)
_PLACES = (
    "Lisbon",
    "Vienna",
    "Oslo",
    "Cairo",
    "Lima",
    "Kyoto",
    "Nairobi",
    "Quebec",
    "Dublin",
    "Athens",
    "Prague",
    "Madrid",
    "Geneva",
    "Havana",
    "Riga",
    "Sofia",
    "Tunis",
    "Warsaw",
    "Zurich",
    "Bergen",
    "Calgary",
    "Delhi",
    "Florence",
    "Ghent",
    "Hanoi",
    "Izmir",
    "Jakarta",
    "Krakow",
    "Leipzig",
    "Manila",
    "Naples",
    "Odessa",
    "Porto",
    "Rotterdam",
    "Seville",
    "Toledo",
    "Utrecht",
    "Verona",
    "Windsor",
    "York",
    "Aberdeen",
    "Boston",
    "Cordoba",
    "Dresden",
    "Edinburgh",
    "Freiburg",
    "Granada",
    "Hamburg",
)
_ADJECTIVES = (
    "amber",
    "brisk",
    "copper",
    "dusty",
    "eager",
    "faded",
    "gentle",
    "hollow",
    "ivory",
    "jolly",
    "keen",
    "lunar",
    "misty",
    "noble",
    "olive",
    "proud",
    "quiet",
    "rustic",
    "silver",
    "tidy",
    "upper",
    "velvet",
    "witty",
    "young",
    "azure",
    "bronze",
    "crimson",
    "distant",
    "early",
    "frozen",
    "golden",
    "humble",
)
_NOUNS = (
    "falcon",
    "anchor",
    "bridge",
    "candle",
    "dragon",
    "engine",
    "forest",
    "garden",
    "harbor",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "meadow",
    "needle",
    "orchard",
    "pepper",
    "quarry",
    "ribbon",
    "saddle",
    "temple",
    "umbrella",
    "violin",
    "window",
    "yarrow",
    "badger",
    "cactus",
    "dolphin",
    "ember",
    "fiddle",
    "goblet",
    "hammer",
)
_WOODS = (
    "cedar",
    "oak",
    "maple",
    "walnut",
    "birch",
    "pine",
    "willow",
    "elm",
    "iron",
    "stone",
    "brass",
    "marble",
)
_ROOMS = (
    "vault",
    "cellar",
    "library",
    "tower",
    "chapel",
    "stable",
    "pantry",
    "attic",
    "gallery",
    "kitchen",
    "study",
    "ballroom",
    "boathouse",
    "granary",
    "armory",
    "nursery",
    "parlor",
    "greenhouse",
    "workshop",
    "observatory",
)


@dataclass(frozen=True)
class Fact:
    """One planted sentence and the question about it."""

    kind: str
    """One of KINDS."""
    sentence: str
    """What is planted; ends with a full stop."""
    question: str
    """One line; the model should go on with a blank, the answer and a full stop."""
    answer: str

    @property
    def prompt(self) -> str:
        """What is appended to the text to ask: the question on a line of its own."""
        return f"\n{self.question}"

    @property
    def completion(self) -> str:
        """What a right answer looks like."""
        return f" {self.answer}."

    def is_correct(self, given: str) -> bool:
        """Whether the text that a model went on with is the answer, up to the full stop."""
        return given.split(".")[0].strip() == self.answer


def make_fact(rng: random.Random, kind: str) -> Fact:
    """One fact of a kind, its key and answer drawn at random.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind == "place":
        stem = f"The meeting with {rng.choice(_TITLES)} {rng.choice(_SURNAMES)} takes place in"
        answer = rng.choice(_PLACES)
    elif kind == "value":
        stem = f"The value of {rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)} is"
        answer = str(rng.randrange(10_000, 100_000))
    elif kind == "passkey":
        stem = f"The pass key of the {rng.choice(_WOODS)} {rng.choice(_ROOMS)} is"
        answer = str(rng.randrange(10_000, 100_000))
    else:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    return Fact(kind, f"{stem} {answer}.", f"Recall: {stem}", answer)


def make_facts(rng: random.Random, kinds: Sequence[str], n: int) -> list[Fact]:
    """n facts that take turns through `kinds`; no two ask the same question.

    Args:
        n: At most a few hundred: keys are drawn again until they differ.
    """
    facts: dict[str, Fact] = {}
    while len(facts) < n:
        fact = make_fact(rng, kinds[len(facts) % len(kinds)])
        facts.setdefault(fact.question, fact)
    return list(facts.values())


def plant(text: str, facts: Sequence[Fact], depths: Sequence[float]) -> str:
    """Put each fact's sentence at the line or sentence boundary nearest its depth; the text itself
    stays as it is.

    Args:
        depths: One for each fact, from 0 (the beginning) to 1 (the end).

    Raises:
        ValueError: the numbers of facts and depths differ, or a depth is outside 0 to 1.
    """
    if len(facts) != len(depths):
        raise ValueError(f"depths must be as many as facts, got {len(depths)} and {len(facts)}.")
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths must lie between 0 and 1, got {list(depths)}.")
    places = sorted(
        (nearest_boundary(text, round(depth * len(text))), i) for i, depth in enumerate(depths)
    )
    parts, last = [], 0
    for place, i in places:
        parts += [
            text[last:place],
            facts[i].sentence,
            "\n" if place == 0 or text[place - 1] == "\n" else " ",
        ]
        last = place
    return "".join(parts) + text[last:]


def nearest_boundary(text: str, position: int) -> int:
    """Where a line or sentence begins nearest to a position; the beginning of the text is always
    one."""
    before = max(text.rfind("\n", 0, position) + 1, text.rfind(". ", 0, position) + 2)
    if before == 1:  # neither found
        before = 0
    found = [
        end + len(mark)
        for mark in ("\n", ". ")
        if (end := text.find(mark, max(0, position - 1))) >= 0
    ]
    after = min(found, default=before)
    return before if position - before <= abs(after - position) else after
