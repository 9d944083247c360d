"""Make the miniature's data: text, text with facts asked for at its end, passages with a question.

Batches follow from seed and step alone, so an interrupted training continues as if it had never
stopped.
"""

import hashlib
import random
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from corecontext.data.readers import file_hash, find_file, read_documents, read_lines
from corecontext.data.retrieval import KINDS, make_facts
from corecontext.eval.multidoc_qa import passages, prompt_of
from corecontext.files import UserError, atomic_path
from corecontext.terminal import progress

SPLITS = ("train", "val", "test")
END = 0


class Row(NamedTuple):
    """A sequence with its answers: (start, end, tokens back to the answer's source)."""

    ids: np.ndarray
    answers: list[tuple[int, int, int]]


class Corpus:
    """Token files of one work folder, made by `prepare`.

    Args:
        folder: Where the token files are kept.
        data: The user's folder (lm_train, lm_val, lm_test, tokenizer*.json, multidoc_qa_*), or None
            for the bundled document and its byte-level tokenizer.
    """

    def __init__(self, folder: str | Path, data: str | None) -> None:
        self.folder = Path(folder)
        self.data = data

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer (of the `tokenizers` package)."""
        from tokenizers import Tokenizer

        if self.data is None:
            import corecontext

            return Tokenizer.from_file(
                str(Path(corecontext.__file__).parent / "assets/demo_model/tokenizer.json")
            )
        files = sorted(Path(self.data).glob("tokenizer*.json"))
        if not files:
            raise UserError(
                f"data '{self.data}' must hold tokenizer.json (or tokenizer*.json), got none."
            )
        return Tokenizer.from_file(str(files[0]))

    def encode(self, text: str) -> list[int]:
        """Return token numbers."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def identity(self) -> str | None:
        """Return a hash of the data files, wherever they are; None for the bundled document."""
        if self.data is None:
            return None
        names = ("lm_*", "tokenizer*.json", "multidoc_qa_*")
        files = sorted({path for name in names for path in Path(self.data).glob(name)})
        return hashlib.sha256(
            " ".join(f"{path.name} {file_hash(path)}" for path in files).encode()
        ).hexdigest()

    def is_prepared(self) -> bool:
        """Whether all token files are there."""
        return all(self._tokens(split).exists() for split in SPLITS)

    def _tokens(self, split: str) -> Path:
        return self.folder / f"tokens_{split}.npy"

    def prepare(self) -> dict[str, int]:
        """Write tokens_SPLIT.npy where missing; returns tokens by split."""
        counts = {}
        for split in SPLITS:
            path = self._tokens(split)
            if not path.exists():
                ids = self._read(split)
                with atomic_path(path) as name:
                    np.save(name, ids)
            counts[split] = len(np.load(path, mmap_mode="r"))
        return counts

    def _read(self, split: str) -> np.ndarray:
        """Return the tokens of a split; documents end in END."""
        if self.data is None:
            import corecontext

            text = (Path(corecontext.__file__).parent / "assets/document.txt").read_text(
                encoding="utf-8"
            )
            cut = {
                "train": slice(0, -20000),
                "val": slice(-20000, -10000),
                "test": slice(-10000, None),
            }[split]
            return np.array([*self.encode(text[cut]), END], np.uint16)
        texts = [text for _, _, text in read_documents(find_file(self.data, (f"lm_{split}",)))]
        documents = []
        with progress(f"tokens of lm_{split}", max(1, len(texts))) as advance:
            for i in range(0, len(texts), 64):
                batch = texts[i : i + 64]
                encoded = self.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                documents += [np.array([*text.ids, END], np.uint16) for text in encoded]
                advance(len(batch))
        return np.concatenate(documents)

    @cached_property
    def splits(self) -> dict[str, np.ndarray]:
        """Tokens by split, mapped from disk."""
        return {split: np.load(self._tokens(split), mmap_mode="r") for split in SPLITS}

    @cached_property
    def _ends(self) -> np.ndarray:
        """Whether each token ends a sentence or line, so that a fact may follow."""
        count = self.tokenizer.get_vocab_size()
        return np.array([self.tokenizer.decode([i]).endswith((".", "\n")) for i in range(count)])

    @cached_property
    def _questions(self) -> dict[str, list[dict[str, Any]]]:
        """Multi-document questions by split; none where there are no files."""
        if self.data is None:
            return {"train": [], "test": []}
        questions = {}
        for split in ("train", "test"):
            try:
                path = find_file(self.data, (f"multidoc_qa_{split}",))
                questions[split] = list(read_lines(path, ("question", "answers", "gold_doc")))
            except UserError:
                questions[split] = []
        return questions

    @cached_property
    def _pool(self) -> dict[str, dict[str, Any]]:
        passages_file = find_file(self.data or "", ("multidoc_qa_pool",))
        return {passage["doc_id"]: passage for passage in read_lines(passages_file)}

    def questions(self, split: str) -> list[dict[str, Any]]:
        """Return the multi-document questions of a split."""
        return self._questions[split]

    def text_row(self, split: str, rng: random.Random, length: int) -> np.ndarray:
        """Return a stretch of text."""
        ids = self.splits[split]
        start = rng.randrange(max(1, len(ids) - length))
        return np.asarray(ids[start : start + length], np.int64)

    def fact_row(
        self,
        split: str,
        rng: random.Random,
        length: int,
        only_list: bool = False,
        most: int | None = None,
    ) -> Row:
        """Return text with planted facts and a question about each at its end."""
        most = most or max(1, min(40, length // (48 if only_list else 100)))
        facts = make_facts(rng, rng.sample(KINDS, len(KINDS)), rng.randint(max(1, most // 3), most))
        sentences = [self.encode(f" {fact.sentence}\n") for fact in facts]
        ends = [len(self.encode(f" {fact.sentence}")) for fact in facts]
        asked = rng.sample(range(len(facts)), len(facts))
        tail: list[int] = []
        spans = []
        for i in asked:
            tail += self.encode(facts[i].prompt)
            answer = self.encode(facts[i].completion)
            spans.append((len(tail), len(tail) + len(answer), i))
            tail += answer
        room = length - len(tail) - sum(map(len, sentences))
        if room < 0:  # long words in a short row: fewer facts
            if most > 1:
                return self.fact_row(split, rng, length, only_list, most // 2)
            return Row(self.text_row(split, rng, length), [])
        body = self.text_row(split, rng, room) if room else np.zeros(0, np.int64)
        room = len(body)
        places = sorted(
            (0 if only_list else self._boundary(body, rng.randrange(room + 1)), i)
            for i in range(len(facts))
        )
        if only_list:
            places = [(room, i) for _, i in places]
        # Facts go into the text in order of their places; `where` is the end of each fact.
        pieces: list[np.ndarray] = []
        where = {}
        last = count = 0
        for place, i in places:
            pieces += [body[last:place], np.array(sentences[i])]
            count += place - last
            where[i] = count + ends[i]
            count += len(sentences[i])
            last = place
        pieces += [body[last:], np.array(tail)]
        ids = np.concatenate(pieces)
        offset = len(ids) - len(tail)
        return Row(ids, [(offset + a, offset + b, offset + a - where[i]) for a, b, i in spans])

    def _boundary(self, body: np.ndarray, place: int) -> int:
        """Return the next place where a sentence has ended, else this one."""
        after = self._ends[body[place : place + 100]]
        return place + int(after.argmax()) + 1 if after.any() else place

    def qa_row(
        self, split: str, question: dict[str, Any], rng: random.Random, count: int, length: int
    ) -> Row | None:
        """Return passages, a question and its answer; None if over `length` tokens."""
        documents = passages(
            self._pool, question, count, rng.randrange(count), rng.randrange(1 << 30)
        )
        prompt = self.encode(prompt_of(question, documents))
        answer = self.encode(f" {question['answers'][0]}\n")
        if len(prompt) + len(answer) > length:
            return None
        ids = np.array(prompt + answer)
        return Row(ids, [(len(prompt), len(ids), 0)])

    def planted_qa_row(self, rng: random.Random, count: int, length: int) -> Row | None:
        """Return passages that end in a fact each, and the question about one of them.

        None if over `length` tokens, or without passages in the data.
        """
        if not self.questions("test"):
            return None
        documents = rng.sample(sorted(self._pool), count)
        facts = make_facts(rng, rng.sample(KINDS, len(KINDS)), count)
        asked = rng.randrange(count)
        texts = []
        for i, (name, fact) in enumerate(zip(documents, facts), 1):
            passage = self._pool[name]
            head = f"Document [{i}](Title: {passage['title']})"
            texts.append(self.encode(f"{head} {passage['text']} {fact.sentence}\n"))
        question = self.encode(facts[asked].prompt)
        answer = self.encode(facts[asked].completion)
        ids = np.array([token for text in (*texts, question, answer) for token in text])
        if len(ids) > length:
            return None
        start = len(ids) - len(answer)
        return Row(ids, [(start, len(ids), start - sum(map(len, texts[: asked + 1])))])

    def batch(self, seed: int, step: int, length: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return training rows [rows, length], int32, and their tokens' weights, uint8.

        Half of the rows are text, then come facts, and a tenth are passages.
        """
        rng = random.Random(f"{seed}-{step}-{length}")
        tokens = np.empty((rows, length), np.int32)
        weights = np.ones((rows, length), np.uint8)
        train = self.questions("train")
        for i in range(rows):
            row = None
            if i >= rows - round(rows / 10) and train:
                row = self.qa_row(
                    "train", rng.choice(train), rng, rng.randint(1, max(1, length // 160)), length
                )
            elif i >= rows / 2:
                row = self.fact_row(
                    "train", rng, length, rng.random() < (0.5 if length <= 1024 else 0.2)
                )
            row = row or Row(self.text_row("train", rng, length), [])
            filler = (
                self.text_row("train", rng, length - len(row.ids))
                if len(row.ids) < length
                else row.ids[:0]
            )
            ids = np.concatenate((filler, row.ids))[-length:]
            tokens[i, length - len(ids) :] = ids
            tokens[i, : length - len(ids)] = END
            weights[i, : length - len(ids)] = 0
            if row.answers:
                weight = 0.5 * length / sum(b - a for a, b, _ in row.answers)
                for a, b, _ in row.answers:
                    weights[i, a + len(filler) : b + len(filler)] = round(min(max(weight, 4), 100))
        return torch.from_numpy(tokens), torch.from_numpy(weights)


class Batches(torch.utils.data.Dataset):
    """Batches by step, for worker processes."""

    def __init__(self, corpus: Corpus, seed: int, length: int, rows: int) -> None:
        self.corpus = corpus
        self.seed = seed
        self.shape = (length, rows)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        return self.corpus.batch(self.seed, step, *self.shape)

    def __len__(self) -> int:
        return 1 << 40
