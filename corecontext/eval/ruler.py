"""The 13 synthetic tasks of RULER (arXiv 2404.06654) at any length, made here from word lists and
essays.

Numbers, needle and metrics are RULER's; the wording of the instructions is ours, so scores compare
methods with one another and not with published ones. A length bounds prompt and answer together, in
the model's own tokens.

Files: ruler_words (adjectives, nouns, verbs), haystack_essays (text), squad_xquad_en or squad
(context, qas: question, answers) for qa_1, hotpotqa (question, answer, context: titles with
sentences) for qa_2.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from corecontext.data.readers import find_file, read_json, read_lines
from corecontext.data.retrieval import nearest_boundary
from corecontext.eval.items import Generated, Item, Question, Settings, TooLong
from corecontext.eval.scores import match_all, match_any
from corecontext.eval.subject import Subject
from corecontext.files import UserError
from corecontext.terminal import console

FILES = ("ruler_words", "haystack_essays", "squad_xquad_en", "squad", "hotpotqa")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = 40
"""Places of a needle, evenly spaced from the beginning to the end."""


class Needles(NamedTuple):
    """The settings of a needle task."""

    haystack: str = "essay"
    """"noise", "essay", or "needle": nothing but other needles."""
    key: str = "word"
    value: str = "number"
    """"word" or "uuid"; "number" or "uuid"."""
    keys: int = 1
    values: int = 1
    asked: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles(),
    "niah_single_3": Needles(value="uuid"),
    "niah_multikey_1": Needles(keys=4),
    "niah_multikey_2": Needles("needle"),
    "niah_multikey_3": Needles("needle", "uuid", "uuid"),
    "niah_multivalue": Needles(values=4),
    "niah_multiquery": Needles(keys=4, asked=4),
}
NEW_TOKENS = {
    **dict.fromkeys(NEEDLES, 128),
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa_1": 32,
    "qa_2": 32,
}
SUBTASKS = tuple(NEW_TOKENS)
Build = Callable[[random.Random, int], Question]
"""A sample with so many units of haystack."""


class Source:
    """The data files, each read when first needed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder

    @cached_property
    def words(self) -> dict[str, list[str]]:
        """Adjectives, nouns and verbs: single words."""
        lists = read_json(find_file(self.folder, FILES[:1], (".json",)))
        if not isinstance(lists, dict) or not all(
            lists.get(kind) for kind in ("adjectives", "nouns", "verbs")
        ):
            raise UserError(
                f"data '{self.folder}' must hold adjectives, nouns and verbs in ruler_words."
            )
        return {
            kind: sorted({word for word in some if word.isalpha()}) for kind, some in lists.items()
        }

    @cached_property
    def essay_words(self) -> list[str]:
        """All essays as one list of words."""
        words = [
            word
            for one in read_lines(find_file(self.folder, FILES[1:2]), ("text",))
            for word in one["text"].split()
        ]
        if not words:
            raise UserError(f"data '{self.folder}' must hold words in haystack_essays, got none.")
        return words

    @cached_property
    def squad(self) -> tuple[list[str], list[tuple[str, list[str], list[int]]]]:
        """Passages; questions with their answers and the numbers of their passages."""
        passages, questions = [], []
        for one in read_lines(find_file(self.folder, FILES[2:4]), ("context", "qas")):
            for ask in one["qas"]:
                if not {"question", "answers"} <= set(ask):
                    raise UserError(
                        f"qas of '{self.folder}' must have question and answers, got {ask!r}"[:300]
                    )
                answers = [x["text"] if isinstance(x, dict) else x for x in ask["answers"]]
                questions.append((ask["question"], answers, [len(passages)]))
            passages.append(one["context"])
        return passages, questions

    @cached_property
    def hotpot(self) -> tuple[list[str], list[tuple[str, list[str], list[int]]]]:
        """The same of HotpotQA's distractor setting: a question's own ten passages belong to it."""
        path = find_file(self.folder, FILES[4:], (".json", ".jsonl"))
        rows = list(read_lines(path)) if ".jsonl" in path.suffixes else read_json(path)
        numbers: dict[str, int] = {}
        questions = []
        for one in rows:
            own = [f"{title}\n{''.join(lines)}" for title, lines in one["context"]]
            questions.append(
                (
                    one["question"],
                    [one["answer"]],
                    [numbers.setdefault(x, len(numbers)) for x in own],
                )
            )
        return list(numbers), questions


def items(folder: str | Path, settings: Settings, subject: Subject) -> list[Item]:
    """Samples of each subtask at each length: `limit` of them, or 500."""
    for one in settings.subtasks:
        if one not in SUBTASKS:
            raise UserError(f"subtask must be one of {', '.join(SUBTASKS)}, got {one!r}.")
    source, found = Source(folder), []
    for task in settings.subtasks or SUBTASKS:
        for length in settings.lengths or (4096,):
            try:
                found += _samples(task, length, source, settings, subject)
            except UserError as missing:
                if settings.subtasks:
                    raise
                console().print(f"{task} left out: {missing}")
                break
    if not found:
        raise UserError(f"data '{folder}' must hold the files of a task, got none.")
    return found


def _samples(
    task: str, length: int, source: Source, settings: Settings, subject: Subject
) -> list[Item]:
    """One subtask at one length."""
    new = settings.max_new_tokens or NEW_TOKENS[task]
    count = 500 if settings.limit is None else settings.limit
    if task.startswith("qa"):  # questions are taken in turn, and there may be fewer
        count = min(count, len((source.squad if task == "qa_1" else source.hotpot)[1]))
    elif task in NEEDLES and NEEDLES[task].haystack == "essay":
        find_file(source.folder, FILES[1:2])  # missing files are said before anything runs
    if task not in ("vt", "fwe", "qa_1", "qa_2"):
        find_file(source.folder, FILES[:1], (".json",))
    fitted: list[int] = []

    def make(index: int) -> Question:
        build, step = builder(task, length, index, source)
        if (
            not fitted
        ):  # by the first sample, whichever is asked first: resumed runs make the same prompts
            fitted.append(
                largest_fitting(
                    *builder(task, length, 0, source),
                    _rng(settings.seed, task, length, 0),
                    length - new,
                    subject,
                )
            )
        units = fitted[0]
        while True:
            question = build(_rng(settings.seed, task, length, index), units)
            if len(subject.encode(question.prompt)) + new <= length:
                return question
            if units == 0:
                needed = len(subject.encode(question.prompt)) + new
                raise TooLong(f"{task} needs at least {needed} tokens, got {length}")
            units = max(0, units - step)

    score = match_any if task.startswith("qa") else match_all
    return [
        Generated(
            f"{task}/{length}/{index}",
            {"length": length, "subtask": task, **_depth(task, index)},
            partial(make, index),
            new,
            score,
        )
        for index in range(count)
    ]


def _depth(task: str, index: int) -> dict[str, float]:
    """Where the only needle stands, 0 for the beginning and 1 for the end; nothing for other
    tasks."""
    one = NEEDLES.get(task)
    return (
        {}
        if one is None or one.keys * one.values > 1
        else {"depth": round(_place(index) / (DEPTHS - 1), 3)}
    )


def _place(index: int) -> int:
    """One needle goes through all places, well spread from the first sample on."""
    return index * 23 % DEPTHS


def _rng(seed: int, task: str, length: int, index: int) -> random.Random:
    return random.Random(f"{seed}-{task}-{length}-{index}")


def largest_fitting(
    build: Build, step: int, rng: random.Random, room: int, subject: Subject
) -> int:
    """Most units, a multiple of the step, with which the prompt has at most `room` tokens; 0 if
    none fits."""
    state = rng.getstate()

    def fits(steps: int) -> bool:
        rng.setstate(state)
        return len(subject.encode(build(rng, steps * step).prompt)) <= room

    high = 1
    while fits(high):
        high *= 2
        if high > room:  # every step adds at least a token, or the data has run out
            return high // 2 * step
    low = high // 2  # fits, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def builder(task: str, length: int, index: int, source: Source) -> tuple[Build, int]:
    """What makes a sample, and the step in which its haystack grows."""
    if task in NEEDLES:
        one = NEEDLES[task]
        return partial(_needles, one, index, source), 50 if one.haystack == "essay" else 5
    if task in ("qa_1", "qa_2"):
        return partial(_passages, *(source.squad if task == "qa_1" else source.hotpot), index), 1
    if task == "vt":
        return _variables, 5
    if task == "cwe":
        return partial(_common_words, source, *((30, 3) if length >= 4096 else (10, 2))), 10
    return partial(_frequent_words, length), 10


# Needles
# -------------------------------------------------------------------------------------------------------------


def _needles(kind: Needles, index: int, source: Source, rng: random.Random, units: int) -> Question:
    noun = "uuids" if kind.value == "uuid" else "numbers"
    keys: dict[str, list[str]] = {}
    while len(keys) < kind.keys:
        keys.setdefault(_key(kind, source, rng), [_value(kind, rng) for _ in range(kind.values)])
    needles = [_needle(noun, key, value) for key, some in keys.items() for value in some]
    rng.shuffle(needles)
    depths = [_place(index)] if len(needles) == 1 else [rng.randrange(DEPTHS) for _ in needles]
    text = _haystack(kind, noun, source, rng, units, set(keys))
    places = sorted(
        (nearest_boundary(text, round(depth / (DEPTHS - 1) * len(text))), i)
        for i, depth in enumerate(depths)
    )
    parts, last = [], 0
    for place, i in places:
        parts += [text[last:place].strip(), needles[i]]
        last = place
    hidden = (" " if kind.haystack == "essay" else "\n").join(
        part for part in (*parts, text[last:].strip()) if part
    )
    asked = list(keys)[: kind.asked]
    many = kind.values > 1 or kind.asked > 1
    names = ", ".join(asked[:-1]) + f" and {asked[-1]}" if len(asked) > 1 else asked[0]
    thing = f"special magic {noun if many else noun[:-1]}"
    prompt = (
        f"Somewhere in the text below, special magic {noun} are given. Keep them in mind: a question about them "
        f"follows the text.\n{hidden}\nQuestion: what {'are all the' if many else 'is the'} {thing} for {names} "
        f"in the text?\nAnswer: the {thing} for {names} in the text {'are' if many else 'is'}"
    )
    return Question(prompt, [value for key in asked for value in keys[key]])


def _needle(noun: str, key: str, value: str) -> str:
    return f"One of the special magic {noun} for {key} is: {value}."


def _key(kind: Needles, source: Source, rng: random.Random) -> str:
    if kind.key == "uuid":
        return _uuid(rng)
    return f"{rng.choice(source.words['adjectives'])}-{rng.choice(source.words['nouns'])}".lower()


def _value(kind: Needles, rng: random.Random) -> str:
    return _uuid(rng) if kind.value == "uuid" else str(rng.randrange(10**6, 10**7))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _haystack(
    kind: Needles, noun: str, source: Source, rng: random.Random, units: int, used: set[str]
) -> str:
    """So many words of essays, repetitions of the noise, or other needles with keys not used so
    far."""
    if kind.haystack == "noise":
        return "\n".join([NOISE] * units)
    if kind.haystack == "essay":
        words = source.essay_words
        return " ".join(words[i % len(words)] for i in range(units))
    lines: list[str] = []
    while len(lines) < units:
        key = _key(kind, source, rng)
        if key not in used:
            used.add(key)
            lines.append(_needle(noun, key, _value(kind, rng)))
    return "\n".join(lines)


# Tracing and counting
# ------------------------------------------------------------------------------------------------


def _variables(rng: random.Random, units: int, hops: int = 4) -> Question:
    """A chain of assignments in noise, after a short solved example."""
    example, right = _chain(rng, 2, hops)
    text, names = _chain(rng, units, hops)
    return Question(f"{example} {' '.join(right)}.\n\n{text}", names)


def _chain(rng: random.Random, units: int, hops: int) -> tuple[str, list[str]]:
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5))
        names += [name] * (name not in names)
    value = rng.randrange(10_000, 100_000)
    links = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a}" for a, b in zip(names, names[1:]))]
    lines = [NOISE] * units
    for place, link in zip(
        sorted(rng.choices(range(units + 1), k=len(links)), reverse=True), reversed(links)
    ):
        lines.insert(place, link)
    text = "\n".join(lines)
    return (
        "Follow the assignments of variables that are hidden in the text.\n"
        f"{text}\nQuestion: which variables are assigned the value {value}, directly or through others?\n"
        f"Answer: the {len(names)} variables with the value {value} are"
    ), names


def _common_words(
    source: Source, often: int, seldom: int, rng: random.Random, units: int
) -> Question:
    """Ten words often, others seldom, in a numbered list, after a short solved example."""
    words = sorted({word.lower() for some in source.words.values() for word in some})
    rng.shuffle(words)
    common, others = words[:10], words[20 : 20 + units]
    example, right = _word_list(rng, words[10:20], words[-20:], 10, 2 if often == 10 else 3)
    text, _ = _word_list(rng, common, others, often, seldom)
    return Question(f"{example} {right}.\n\n{text}", common)


def _word_list(
    rng: random.Random, common: Sequence[str], others: Sequence[str], often: int, seldom: int
) -> tuple[str, str]:
    words = [*list(common) * often, *list(others) * seldom]
    rng.shuffle(words)
    listed = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return (
        f"In the numbered list below some words occur much more often than others.\n{listed}\nQuestion: which are "
        "the ten most common words of the list?\nAnswer: the ten most common words are"
    ), " ".join(common)


def _frequent_words(length: int, rng: random.Random, units: int) -> Question:
    """Made-up words whose frequencies fall with the square of their rank; the first one is written
    as dots."""
    count = max(4, length // 50)
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))
        words += [word] * (word not in words)
    total = max(units, 100)  # fewer would tie the third word with the fourth
    scale = total / sum(rank**-2 for rank in range(1, count + 1))
    text = [
        word
        for rank, word in enumerate(["...", *words[1:]], 1)
        for _ in range(round(scale * rank**-2))
    ]
    rng.shuffle(text)
    return Question(
        f"The text below is in a secret code. Disregard the dots and count the coded words.\n"
        f"{' '.join(text)}\nQuestion: which three coded words occur most often?\nAnswer: the three coded "
        "words that occur most often are",
        words[1:4],
    )


# Questions
# -----------------------------------------------------------------------------------------------------------


def _passages(
    passages: Sequence[str],
    questions: Sequence[tuple[str, list[str], list[int]]],
    index: int,
    rng: random.Random,
    units: int,
) -> Question:
    """A question's own passages among others."""
    question, answers, own = questions[index]
    others = [i for i in range(len(passages)) if i not in own]
    picked = own + rng.sample(others, min(units, len(others)))
    rng.shuffle(picked)
    listed = "\n\n".join(f"Document {n}:\n{passages[i]}" for n, i in enumerate(picked, 1))
    return Question(
        f"Answer the question from the documents below, with the answer alone.\n\n{listed}\n\nQuestion: "
        f"{question}\nAnswer:",
        answers,
    )
