"""Facts are distinct, planting keeps the text, and answers are compared up to the full stop."""

import random

import pytest

from corecontext.data import retrieval
from corecontext.data.retrieval import KINDS, Fact, make_fact, make_facts, nearest_boundary, plant

TEXT = "\n".join(f"Line {i} says this. It goes on for a while, as lines do." for i in range(200))


@pytest.mark.parametrize("kind", KINDS)
def test_fact_answers_its_question(kind: str) -> None:
    fact = make_fact(random.Random(0), kind)
    assert fact.kind == kind
    assert (fact.question + fact.completion).removeprefix("Recall: ") == fact.sentence
    assert fact.prompt == "\n" + fact.question
    assert fact.is_correct(fact.completion + "\nRecall: something else.")
    assert not fact.is_correct(f" {fact.answer}0.")
    assert not fact.is_correct("")


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        make_fact(random.Random(0), "color")


def test_facts_are_distinct_and_reproducible() -> None:
    facts = make_facts(random.Random(1), KINDS, 200)
    assert len({fact.question for fact in facts}) == 200
    assert [fact.kind for fact in facts[:4]] == ["place", "value", "passkey", "place"]
    assert facts == make_facts(random.Random(1), KINDS, 200)
    lists = [x for x in vars(retrieval).values() if isinstance(x, list)]
    assert [len(set(words)) for words in lists] == [8, 32, 48, 32, 32, 12, 20]


def test_plant_keeps_the_text_and_order() -> None:
    facts = make_facts(random.Random(2), KINDS, 9)
    depths = [0.05 + 0.9 * i / 8 for i in range(9)]
    planted = plant(TEXT, facts, depths)
    starts = [planted.index(fact.sentence) for fact in facts]
    assert starts == sorted(starts)
    assert all(abs(start / len(planted) - depth) < 0.03 for start, depth in zip(starts, depths))
    assert all(planted[start - 1] == "\n" or planted[start - 2 : start] == ". " for start in starts)
    for fact in facts:
        planted = planted.replace(fact.sentence + "\n", "").replace(fact.sentence + " ", "")
    assert planted == TEXT


def test_plant_at_the_ends_and_in_any_order() -> None:
    facts = make_facts(random.Random(3), KINDS, 3)
    planted = plant(TEXT, facts, [1.0, 0.0, 0.5])
    assert planted.startswith(facts[1].sentence + "\nLine 0")
    assert planted.index(facts[2].sentence) < planted.index(facts[0].sentence)
    assert plant("", facts[:1], [0.5]) == facts[0].sentence + "\n"


def test_plant_checks_depths() -> None:
    facts = make_facts(random.Random(4), KINDS, 1)
    with pytest.raises(ValueError, match="as many as facts"):
        plant(TEXT, facts, [])
    with pytest.raises(ValueError, match="between 0 and 1"):
        plant(TEXT, facts, [1.5])


def test_plant_at_one_place_keeps_the_order_of_facts() -> None:
    facts = make_facts(random.Random(3), KINDS, 3)
    first, second, third = (fact.sentence for fact in facts)
    assert plant("One. Two.", facts, [0.6, 0.5, 0.0]) == (f"{third}\nOne. {first} {second} Two.")
    assert plant("a\nb", facts, [1.0, 1.0, 1.0]) == f"a\n{first}\n{second}\n{third}\nb"


@pytest.mark.parametrize(
    "text", ["", "abc", "a\n", "ab\ncd", "One. Two", "A. B\nC. D", ". a", "a. ", "\n\na", "a.\nb"]
)
def test_of_two_boundaries_at_one_distance_the_first_is_taken(text: str) -> None:
    starts = [0]
    starts += [i for i in range(1, len(text) + 1) if text[i - 1] == "\n" or text[i - 2 : i] == ". "]
    for position in range(len(text) + 1):
        wanted = min(starts, key=lambda start: (abs(start - position), start))
        assert nearest_boundary(text, position) == wanted, position


def test_an_answer_ends_at_its_full_stop() -> None:
    fact = Fact("place", "S in Oslo.", "Recall: S in", "Oslo")
    for given in (" Oslo.", "Oslo", " Oslo . And", "\nOslo.\n"):
        assert fact.is_correct(given)
    for given in (" oslo.", " in Oslo.", "", ".", " Oslo, and"):
        assert not fact.is_correct(given)


@pytest.mark.parametrize("position", range(0, 400, 7))
def test_nearest_boundary(position: int) -> None:
    place = nearest_boundary(TEXT, position)
    assert place == 0 or TEXT[place - 1] == "\n" or TEXT[place - 2 : place] == ". "
    boundaries = [
        i for i in range(len(TEXT)) if i == 0 or TEXT[i - 1] == "\n" or TEXT[i - 2 : i] == ". "
    ]
    assert abs(place - position) == min(abs(b - position) for b in boundaries)
