"""Plant facts in real text, and make the questions that ask for them (synthetic retrieval).

A question repeats the beginning of the fact's sentence after "Recall:"; the answer is the rest of
the sentence.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("place", "value", "passkey")


def _words(text: str) -> list[str]:
    return text.split()


_TITLES = _words("Dr Mr Mrs Miss Captain Professor Judge Lady")
_SURNAMES = _words("""
    Harlow Bennett Carver Dalton Everett Fisher Granger Hollis Ingram Jarvis Keller Lambert
    Mercer Norwood Osborne Palmer Quincy Redmond Sawyer Thorne Upton Vaughan Whitaker Yardley
    Ashby Blackwood Corbett Drummond Ellison Farrell Gibbs Hartley
""")
_PLACES = _words("""
    Lisbon Vienna Oslo Cairo Lima Kyoto Nairobi Quebec Dublin Athens Prague Madrid Geneva Havana
    Riga Sofia Tunis Warsaw Zurich Bergen Calgary Delhi Florence Ghent Hanoi Izmir Jakarta
    Krakow Leipzig Manila Naples Odessa Porto Rotterdam Seville Toledo Utrecht Verona Windsor
    York Aberdeen Boston Cordoba Dresden Edinburgh Freiburg Granada Hamburg
""")
_ADJECTIVES = _words("""
    amber brisk copper dusty eager faded gentle hollow ivory jolly keen lunar misty noble olive
    proud quiet rustic silver tidy upper velvet witty young azure bronze crimson distant early
    frozen golden humble
""")
_NOUNS = _words("""
    falcon anchor bridge candle dragon engine forest garden harbor island jacket kettle ladder
    meadow needle orchard pepper quarry ribbon saddle temple umbrella violin window yarrow
    badger cactus dolphin ember fiddle goblet hammer
""")
_WOODS = _words("cedar oak maple walnut birch pine willow elm iron stone brass marble")
_ROOMS = _words("""
    vault cellar library tower chapel stable pantry attic gallery kitchen study ballroom
    boathouse granary armory nursery parlor greenhouse workshop observatory
""")


@dataclass(frozen=True)
class Fact:
    """A planted sentence and the question about it."""

    kind: str
    """A member of KINDS."""
    sentence: str
    """The planted text; ends with a full stop."""
    question: str
    """A single line; the model should continue with a blank, the answer and a full stop."""
    answer: str

    @property
    def prompt(self) -> str:
        """The question on a line of its own, to append to the text."""
        return f"\n{self.question}"

    @property
    def completion(self) -> str:
        """The right continuation of the prompt."""
        return f" {self.answer}."

    def is_correct(self, given: str) -> bool:
        """Return whether a model's continuation is the answer, up to the full stop."""
        return given.split(".")[0].strip() == self.answer


def make_fact(rng: random.Random, kind: str) -> Fact:
    """Return a fact of a kind; what it is about and its answer are drawn at random.

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
    """Return n facts with different questions, whose kinds alternate through `kinds`.

    Args:
        n: At most a few hundred: facts are drawn again until their questions differ.
    """
    facts: dict[str, Fact] = {}
    while len(facts) < n:
        fact = make_fact(rng, kinds[len(facts) % len(kinds)])
        facts.setdefault(fact.question, fact)
    return list(facts.values())


def plant(text: str, facts: Sequence[Fact], depths: Sequence[float]) -> str:
    """Insert each fact's sentence at the line or sentence boundary nearest its depth; the text
    itself does not change.

    Args:
        depths: A number for each fact, from 0 (the beginning) to 1 (the end).

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
    pieces = []
    start = 0
    for place, i in places:
        on_new_line = place == 0 or text[place - 1] == "\n"
        pieces += [text[start:place], facts[i].sentence, "\n" if on_new_line else " "]
        start = place
    return "".join(pieces) + text[start:]


def nearest_boundary(text: str, position: int) -> int:
    """Return the position nearest to `position` at which a line or a sentence begins; 0 is always
    one."""
    before = max(text.rfind("\n", 0, position) + 1, text.rfind(". ", 0, position) + 2)
    if before == 1:  # neither found
        before = 0
    after = before
    ends = [
        at + len(ending)
        for ending in ("\n", ". ")
        if (at := text.find(ending, max(0, position - 1))) >= 0
    ]
    if ends:
        after = min(ends)
    return before if position - before <= abs(after - position) else after
