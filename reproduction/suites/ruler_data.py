"""Read the data files of RULER's tasks: word lists, essays, and questions with their passages."""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from corecontext.data.readers import find_file, read_json, read_lines
from corecontext.files import UserError

WORDS = ("ruler_words",)
ESSAYS = ("haystack_essays",)
SQUAD = ("squad_xquad_en", "squad")
HOTPOT = ("hotpotqa",)
FILES = (*WORDS, *ESSAYS, *SQUAD, *HOTPOT)


class Passages(NamedTuple):
    """Passages, and questions with their answers and the numbers of their passages."""

    texts: list[str]
    questions: list[tuple[str, list[str], list[int]]]


class Source:
    """The data files, each read on first use."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder

    @cached_property
    def words(self) -> dict[str, list[str]]:
        """Adjectives, nouns and verbs: single words."""
        lists = read_json(find_file(self.folder, WORDS, (".json",)))
        kinds = ("adjectives", "nouns", "verbs")
        if not isinstance(lists, dict) or not all(lists.get(kind) for kind in kinds):
            raise UserError(
                f"data '{self.folder}' must hold adjectives, nouns and verbs in ruler_words."
            )
        return {
            kind: sorted({word for word in words if word.isalpha()})
            for kind, words in lists.items()
        }

    @cached_property
    def essay_words(self) -> list[str]:
        """All essays as a list of words."""
        words: list[str] = []
        for essay in read_lines(find_file(self.folder, ESSAYS), ("text",)):
            words += essay["text"].split()
        if not words:
            raise UserError(f"data '{self.folder}' must hold words in haystack_essays, got none.")
        return words

    @cached_property
    def squad(self) -> Passages:
        """SQuAD's passages, and the questions that have an answer: SQuAD 2 has others, too."""
        result = Passages([], [])
        for row in read_lines(find_file(self.folder, SQUAD), ("context", "qas")):
            for qa in row["qas"]:
                if not {"question", "answers"} <= set(qa):
                    raise UserError(
                        f"qas of '{self.folder}' must have question and answers, got {qa!r}"[:300]
                    )
                answers = [x["text"] if isinstance(x, dict) else x for x in qa["answers"]]
                if answers:
                    result.questions.append((qa["question"], answers, [len(result.texts)]))
            result.texts.append(row["context"])
        return result

    @cached_property
    def hotpot(self) -> Passages:
        """HotpotQA's distractor setting: the ten passages of a question belong to it."""
        path = find_file(self.folder, HOTPOT, (".json", ".jsonl"))
        rows = list(read_lines(path)) if ".jsonl" in path.suffixes else read_json(path)
        numbers: dict[str, int] = {}
        questions = []
        for row in rows:
            try:
                texts = [f"{title}\n{''.join(lines)}" for title, lines in row["context"]]
                question, answer = row["question"], row["answer"]
            except (KeyError, TypeError, ValueError):
                raise UserError(
                    f"rows of '{path}' must have question, answer, and context, a list of "
                    f"[title, sentences], got {row!r}"[:300]
                ) from None
            indices = [numbers.setdefault(text, len(numbers)) for text in texts]
            questions.append((question, [answer], indices))
        return Passages(list(numbers), questions)

    def passages(self, task: str) -> Passages:
        """Return the passages of qa_1 or qa_2."""
        return self.squad if task == "qa_1" else self.hotpot
