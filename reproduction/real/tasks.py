"""Ask a pretrained model for facts in a long text: one number (needles), or a list of many numbers.

The right answer follows the prompt, and each of its tokens is compared with the model's first
choice, all tokens before it given. For a needle this is whether greedy decoding gives the number,
in one pass; in a list, a record follows the right records before it.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor

from corecontext.data.chat import chat_prompt
from corecontext.data.needles import find_tokens, make_needles
from corecontext.data.retrieval import Fact, make_facts, plant
from corecontext.files import UserError
from reproduction.real.attention import AttentionRun, batches

LIST_RECORDS = 40
"""Records of a list."""
LIST_TOKENS = 2500
"""Tokens of its text."""
RECORD = '{{"name": "{name}", "value": {value}}}'
QUESTION = (
    "The text below has {count} records in JSON. Memorize them: a question follows the text."
    "\n\n{text}\n\nReturn the {count} records in JSON, one a line, in the order of the text."
)


class Question(NamedTuple):
    """A prompt with its right answer."""

    ids: list[int]
    places: tuple[slice, ...]
    """Tokens of each fact in the answer; one is right where all its tokens are."""

    def share_of(self, right: Tensor) -> float:
        """Return the share of the facts whose tokens are right, `right` [n] being those from the
        first fact on."""
        first = self.places[0].start
        return sum(
            bool(right[place.start - first : place.stop - first].all()) for place in self.places
        ) / len(self.places)


def share_right(run: AttentionRun, questions: Sequence[Question]) -> float:
    """Return the mean share of the facts that a model under an attention knows. Prompts of equal
    lengths are read together."""
    alike = defaultdict(list)
    for question in questions:
        alike[len(question.ids), question.places[0].start].append(question)
    shares = []
    for (length, first), group in alike.items():
        for batch in batches(group, length):
            right = run.is_first_choice([question.ids for question in batch], first)
            shares += [question.share_of(each) for question, each in zip(batch, right)]
    return fmean(shares)


def needle_questions(
    text: str, tokenizer: Any, length: int, count: int, seed: int
) -> list[Question]:
    """Return questions for a number that is hidden at even depths."""
    needles = make_needles(text, tokenizer, length, count, seed)
    return [
        Question(
            [*needle.ids, *needle.answer],
            (slice(len(needle.ids), len(needle.ids) + len(needle.answer)),),
        )
        for needle in needles
    ]


def list_questions(
    text: str, tokenizer: Any, count: int, seed: int, records: int = LIST_RECORDS
) -> list[Question]:
    """Return questions for many records, spread evenly over a text of about LIST_TOKENS tokens.

    Raises:
        UserError: the text is too short.
    """
    options = {"return_offsets_mapping": True, "add_special_tokens": False, "verbose": False}
    offsets = tokenizer(text, **options)["offset_mapping"]
    if len(offsets) < LIST_TOKENS:
        raise UserError(
            f"the text around lists must have at least {LIST_TOKENS} tokens, got {len(offsets)}."
        )
    rng = random.Random(f"{seed}-list")
    questions = []
    for _ in range(count):
        facts = [_record(fact) for fact in make_facts(rng, ["value"], records)]
        taken = sum(len(tokenizer(fact.sentence, **options)["input_ids"]) for fact in facts)
        tokens = max(1, LIST_TOKENS - taken)
        start = rng.randrange(len(offsets) - tokens + 1)
        piece = text[offsets[start][0] : offsets[start + tokens - 1][1]]
        questions.append(_list_question(tokenizer, piece, facts))
    return questions


def _record(fact: Fact) -> Fact:
    """Return a fact whose sentence is a record in JSON."""
    name = fact.sentence.split()[3]  # The value of NAME is
    return replace(fact, sentence=RECORD.format(name=name, value=fact.answer))


def _list_question(tokenizer: Any, text: str, facts: list[Fact]) -> Question:
    """Return the question for records in a text, and its answer."""
    depths = [(i + 0.5) / len(facts) for i in range(len(facts))]
    question = QUESTION.format(count=len(facts), text=plant(text, facts, depths))
    asked = chat_prompt(tokenizer, [("user", question)])
    places = []
    for fact in facts:
        asked += f"{fact.sentence}\n"
        end = len(asked) - len("}\n")
        places.append((end - len(fact.answer), end))
    ids, spans = find_tokens(tokenizer, asked, places)
    return Question(ids, tuple(spans))
