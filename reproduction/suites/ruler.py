"""The 13 synthetic tasks of RULER (arXiv 2404.06654) at any length, from word lists and essays.

Numbers, needles and metrics are RULER's. The wording of the instructions is ours, so scores compare
methods with one another, not with published scores. A length bounds prompt and answer together, in
the model's own tokens.

Files: ruler_words (JSON: adjectives, nouns, verbs), haystack_essays (JSON lines: text),
squad_xquad_en or squad (JSON lines, one a passage: context, qas: question, answers) for qa_1,
hotpotqa (JSON or JSON lines: question, answer, context: titles with sentences) for qa_2.
"""

import random
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from corecontext.data.readers import find_file
from corecontext.data.retrieval import nearest_boundary
from corecontext.eval.combine import Values, scores_by
from corecontext.eval.items import Generated, Item, Question, Settings, TooLong, check_subtasks
from corecontext.eval.subject import ModelSubject
from corecontext.files import UserError
from corecontext.record import Record
from reproduction.suites.ruler_data import ESSAYS, HOTPOT, SQUAD, WORDS, Passages, Source
from reproduction.suites.scores import match_all, match_any

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = 40
"""Places of a needle, evenly spaced from the beginning to the end."""
SAMPLES = 500
"""Samples of a subtask at a length without a limit."""


class Needles(NamedTuple):
    """The settings of a needle task."""

    haystack: str = "essay"
    """"noise", "essay", or "needle" (other needles only)."""
    key: str = "word"
    """"word" or "uuid"."""
    value: str = "number"
    """"number" or "uuid"."""
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
NEW_TOKENS = dict.fromkeys(NEEDLES, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
SUBTASKS = tuple(NEW_TOKENS)
WITHOUT_FILES = ("vt", "fwe")
"""Subtasks whose texts are made from nothing but random words and the noise."""
Build = Callable[[random.Random, int], Question]
"""Makes a sample with a number of units of haystack."""


def items(folder: str | Path, settings: Settings, subject: ModelSubject) -> list[Item]:
    """Return samples of each subtask at each length: `limit` of them, or SAMPLES.

    The folder may be "" for subtasks WITHOUT_FILES.
    """
    check_subtasks(settings.subtasks, SUBTASKS)
    for task in settings.subtasks or SUBTASKS:
        try:
            check_files(task, folder)
        except UserError as missing:
            if settings.subtasks:
                raise
            raise UserError(
                f"{missing} RULER's score is that of all {len(SUBTASKS)} subtasks; name those to "
                f"run by --subtask, such as {', '.join(available(folder))}."
            ) from None
    source = Source(folder)
    return [
        sample
        for task in settings.subtasks or SUBTASKS
        for length in settings.lengths or (4096,)
        for sample in _samples(task, length, source, settings, subject)
    ]


def combine(records: Sequence[Record]) -> Values:
    """Return the mean score of each subtask; the whole is the mean of these."""
    values = dict(scores_by("subtask", records))
    _, count = values.pop("")
    whole = sum(value for value, _ in values.values()) / len(values)
    return {"": (whole, count), **values}


def check_files(task: str, folder: str | Path) -> None:
    """Raise a UserError where a file of the subtask is missing."""
    if task == "qa_1":
        find_file(folder, SQUAD)
    elif task == "qa_2":
        find_file(folder, HOTPOT, (".json", ".jsonl"))
    elif task in NEEDLES and NEEDLES[task].haystack == "essay":
        find_file(folder, ESSAYS)
    if task in NEEDLES or task == "cwe":
        find_file(folder, WORDS, (".json",))


def available(folder: str | Path) -> list[str]:
    """Return the subtasks whose files are there."""
    tasks = []
    for task in SUBTASKS:
        with suppress(UserError):
            check_files(task, folder)
            tasks.append(task)
    return tasks


def _samples(
    task: str, length: int, source: Source, settings: Settings, subject: ModelSubject
) -> list[Item]:
    """Return the samples of a subtask at a length."""
    new_tokens = settings.max_new_tokens or NEW_TOKENS[task]
    count = SAMPLES if settings.limit is None else settings.limit
    if task.startswith("qa"):  # each question once
        count = min(count, len(source.passages(task).questions))
    fitted: list[int] = []

    def rng(index: int) -> random.Random:
        return random.Random(f"{settings.seed}-{task}-{length}-{index}")

    def make(index: int) -> Question:
        # Sample 0 determines the size, so that resumed runs make the same prompts.
        if not fitted:
            first, step = builder(task, length, 0, source)
            fitted.append(largest_fitting(first, step, rng(0), length - new_tokens, subject))
        build, step = builder(task, length, index, source)
        units = fitted[0]
        while True:
            question = build(rng(index), units)
            needed = len(subject.encode_prompt(question.prompt)) + new_tokens
            if needed <= length:
                return question
            if units == 0:
                raise TooLong(f"{task} needs at least {needed} tokens, got {length}")
            units = max(0, units - step)

    return [
        Generated(
            f"{task}/{length}/{index}",
            {"length": length, "subtask": task, **_depth(task, index)},
            partial(make, index),
            new_tokens,
            match_any if task.startswith("qa") else match_all,
        )
        for index in range(count)
    ]


def _depth(task: str, index: int) -> dict[str, float]:
    """Return the depth of the only needle, from 0 (the beginning) to 1; {} for other tasks."""
    kind = NEEDLES.get(task)
    if kind is None or kind.keys * kind.values > 1:
        return {}
    return {"depth": round(_place(index) / (DEPTHS - 1), 3)}


def _place(index: int) -> int:
    """Return the place of a single needle: all places in turn, well spread from the start."""
    return index * 23 % DEPTHS


def largest_fitting(
    build: Build, step: int, rng: random.Random, room: int, subject: ModelSubject
) -> int:
    """Return the most units, a multiple of the step, with which the prompt has at most `room`
    tokens; 0 if none fits."""
    state = rng.getstate()

    def fits(steps: int) -> bool:
        rng.setstate(state)
        return len(subject.encode_prompt(build(rng, steps * step).prompt)) <= room

    high = 1
    while high <= room and fits(high):  # each step adds a token, or the data is exhausted
        high *= 2
    between = range(high // 2 + 1, high)  # half of it fits, or is 0
    return (high // 2 + bisect_left(between, True, key=lambda steps: not fits(steps))) * step


def builder(task: str, length: int, index: int, source: Source) -> tuple[Build, int]:
    """Return the function that makes a sample, and the step in which its haystack grows."""
    if task in NEEDLES:
        kind = NEEDLES[task]
        step = 50 if kind.haystack == "essay" else 5
        return partial(_needles, kind, index, source), step
    if task.startswith("qa"):
        return partial(_passages, source.passages(task), index), 1
    if task == "vt":
        return _variables, 5
    if task == "fwe":
        return partial(_frequent_words, length), 10
    if task == "cwe":
        often, seldom = (30, 3) if length >= 4096 else (10, 2)
        return partial(_common_words, source, often, seldom), 10
    raise ValueError(f"task must be one of {', '.join(SUBTASKS)}, got {task!r}.")


def _needles(kind: Needles, index: int, source: Source, rng: random.Random, units: int) -> Question:
    """Make a text with hidden keys and values, and a question for the values of some keys."""
    values: dict[str, list[str]] = {}
    while len(values) < kind.keys:
        key = _key(kind, source, rng)
        drawn = [_value(kind, rng) for _ in range(kind.values)]
        values.setdefault(key, drawn)
    needles = [_needle(kind, key, value) for key in values for value in values[key]]
    rng.shuffle(needles)
    if len(needles) == 1:
        depths = [_place(index)]
    else:
        depths = [rng.randrange(DEPTHS) for _ in needles]
    haystack = _haystack(kind, source, rng, units, set(values))
    text = _hide(haystack, needles, depths, " " if kind.haystack == "essay" else "\n")

    keys = list(values)[: kind.asked]
    names = keys[0]
    if len(keys) > 1:
        names = ", ".join(keys[:-1]) + f" and {keys[-1]}"
    if kind.values > 1 or kind.asked > 1:
        thing = f"special magic {kind.value}s"
        ask = "are all the"
        verb = "are"
    else:
        thing = f"special magic {kind.value}"
        ask = "is the"
        verb = "is"
    prompt = (
        f"Somewhere in the text below, special magic {kind.value}s are given. Keep them in mind: a "
        f"question about them follows the text.\n{text}\nQuestion: what {ask} {thing} for {names} "
        f"in the text?\nAnswer: the {thing} for {names} in the text {verb}"
    )
    return Question(prompt, [value for key in keys for value in values[key]])


def _hide(haystack: str, needles: Sequence[str], depths: Sequence[int], separator: str) -> str:
    """Insert each needle at the boundary nearest its depth, in 0 .. DEPTHS - 1."""
    places = sorted(
        (nearest_boundary(haystack, round(depth / (DEPTHS - 1) * len(haystack))), i)
        for i, depth in enumerate(depths)
    )
    pieces = []
    start = 0
    for place, i in places:
        pieces += [haystack[start:place].strip(), needles[i]]
        start = place
    pieces.append(haystack[start:].strip())
    return separator.join(piece for piece in pieces if piece)


def _needle(kind: Needles, key: str, value: str) -> str:
    return f"One of the special magic {kind.value}s for {key} is: {value}."


def _key(kind: Needles, source: Source, rng: random.Random) -> str:
    if kind.key == "uuid":
        return _uuid(rng)
    return f"{rng.choice(source.words['adjectives'])}-{rng.choice(source.words['nouns'])}".lower()


def _value(kind: Needles, rng: random.Random) -> str:
    return _uuid(rng) if kind.value == "uuid" else str(rng.randrange(10**6, 10**7))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _haystack(
    kind: Needles, source: Source, rng: random.Random, units: int, used_keys: set[str]
) -> str:
    """Return so many repetitions of the noise, words of essays, or needles with other keys."""
    if kind.haystack == "noise":
        return "\n".join([NOISE] * units)
    if kind.haystack == "essay":
        words = source.essay_words
        return " ".join(words[i % len(words)] for i in range(units))
    lines: list[str] = []
    while len(lines) < units:
        key = _key(kind, source, rng)
        if key not in used_keys:
            used_keys.add(key)
            lines.append(_needle(kind, key, _value(kind, rng)))
    return "\n".join(lines)


def _variables(rng: random.Random, units: int, hops: int = 4) -> Question:
    """Make a chain of assignments in noise, after a short solved example."""
    example, solution = _chain(rng, 2, hops)
    text, names = _chain(rng, units, hops)
    return Question(f"{example} {' '.join(solution)}.\n\n{text}", names)


def _chain(rng: random.Random, units: int, hops: int) -> tuple[str, list[str]]:
    """Return the text with its question, and the names of the variables."""
    names = _distinct_words(rng, "ABCDEFGHIJKLMNOPQRSTUVWXYZ", 5, hops + 1)
    value = rng.randrange(10_000, 100_000)
    links = [f"VAR {names[0]} = {value}"]
    links += [f"VAR {names[i + 1]} = VAR {names[i]}" for i in range(hops)]
    lines = [NOISE] * units
    places = sorted(rng.choices(range(units + 1), k=len(links)))
    for place, link in zip(reversed(places), reversed(links)):
        lines.insert(place, link)
    text = "\n".join(lines)
    prompt = (
        "Follow the assignments of variables that are hidden in the text.\n"
        f"{text}\nQuestion: which variables are assigned the value {value}, directly or through "
        f"others?\nAnswer: the {len(names)} variables with the value {value} are"
    )
    return prompt, names


def _distinct_words(rng: random.Random, alphabet: str, letters: int, count: int) -> list[str]:
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choices(alphabet, k=letters))
        if word not in words:
            words.append(word)
    return words


def _common_words(
    source: Source, often: int, seldom: int, rng: random.Random, units: int
) -> Question:
    """Make a numbered list of ten frequent and many rare words, after a short solved example."""
    words = sorted({word.lower() for words in source.words.values() for word in words})
    rng.shuffle(words)
    common = words[:10]
    example = _word_list(rng, words[10:20], words[-20:], 10, 2 if often == 10 else 3)
    text = _word_list(rng, common, words[20 : 20 + units], often, seldom)
    return Question(f"{example} {' '.join(words[10:20])}.\n\n{text}", common)


def _word_list(
    rng: random.Random, common: Sequence[str], rare: Sequence[str], often: int, seldom: int
) -> str:
    """Return a shuffled list with its question."""
    words = [*common] * often + [*rare] * seldom
    rng.shuffle(words)
    text = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return (
        "In the numbered list below some words occur much more often than others.\n"
        f"{text}\nQuestion: which are the ten most common words of the list?\nAnswer: the ten most "
        "common words are"
    )


def _frequent_words(length: int, rng: random.Random, units: int) -> Question:
    """Make a text of invented words whose frequencies fall with the square of their rank; the first
    word is written as dots."""
    count = max(4, length // 50)
    words = _distinct_words(rng, "abcdefghijklmnopqrstuvwxyz", 6, count)
    total = max(units, 100)  # fewer would tie the third word with the fourth
    scale = total / sum(rank**-2 for rank in range(1, count + 1))
    text: list[str] = []
    for rank, word in enumerate(["...", *words[1:]], 1):
        text += [word] * round(scale * rank**-2)
    rng.shuffle(text)
    prompt = (
        "The text below is in a secret code. Disregard the dots and count the coded words.\n"
        f"{' '.join(text)}\nQuestion: which three coded words occur most often?\nAnswer: the three "
        "coded words that occur most often are"
    )
    return Question(prompt, words[1:4])


def _passages(passages: Passages, index: int, rng: random.Random, units: int) -> Question:
    """Make a question whose passages are among others."""
    question, answers, relevant = passages.questions[index]
    rest = [i for i in range(len(passages.texts)) if i not in relevant]
    picked = relevant + rng.sample(rest, min(units, len(rest)))
    rng.shuffle(picked)
    documents = "\n\n".join(f"Document {n}:\n{passages.texts[i]}" for n, i in enumerate(picked, 1))
    prompt = (
        "Answer the question from the documents below, with the answer alone.\n\n"
        f"{documents}\n\nQuestion: {question}\nAnswer:"
    )
    return Question(prompt, answers)
