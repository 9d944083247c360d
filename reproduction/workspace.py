"""Keep a reproduction's work folder: models, records and measurements of its stages."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.head_budget import Unit
from corecontext.files import UserError, atomic_path
from corecontext.inference.fuse import Fused
from corecontext.record import Record, device_name, make_record
from reproduction import scoring
from reproduction.attentions.minference import MInference
from reproduction.methods import Method, fine_config, methods
from reproduction.miniature import given_model, make_model
from reproduction.plan import Stage, layers_of, trained_tokens
from reproduction.sizes import Size
from reproduction.texts import Corpus
from reproduction.training_loop import Schedule, thinned, train

RECORDS = "records.jsonl"
LAYERS = "layers.json"
WEIGHTS = "weights.pt"
SHORT_WEIGHTS = "short.pt"  # of a base model before its longest context


@dataclass
class Workspace:
    """A work folder on this machine."""

    folder: Path
    size: Size
    corpus: Corpus
    device: str
    workers: int = 0
    """Processes that make training batches."""
    time_left: Callable[[], float] = lambda: math.inf
    """Seconds left to this invocation."""

    @cached_property
    def methods(self) -> dict[str, Method]:
        """Every method by name."""
        return methods(self.size)

    def path(self, stage: Stage, name: str) -> Path:
        """Return the path of a stage's file."""
        return self.folder / stage.name / name

    def new_model(self, seed: int) -> LlamaForCausalLM:
        """Make a model with random weights; of a size with a base, with the base's."""
        if self.size.base is not None:
            return given_model(self.size.base).to(self.device)
        model = make_model(self.size, self.corpus.tokenizer.get_vocab_size(), seed)
        return model.to(self.device)

    def load(self, stage: str, name: str = WEIGHTS) -> LlamaForCausalLM:
        """Load the weights of an earlier stage; of a size with a base, those of the base.

        Raises:
            UserError: they are missing, though the stage is done.
        """
        if self.size.base is not None:
            return self.new_model(0)
        path = self.folder / stage / name
        if not path.exists():
            raise UserError(
                f"'{path}' is needed and was left behind, though its stage is done. Remove the "
                "stage's folder to train it again."
            )
        model = self.new_model(0)
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return model

    def save(self, model: LlamaForCausalLM, path: Path) -> None:
        """Save the weights in bfloat16, tied ones once: half the size to carry elsewhere."""
        halves: dict[int, torch.Tensor] = {}
        state = {
            key: halves.setdefault(x.data_ptr(), x.to(torch.bfloat16))
            for key, x in model.state_dict().items()
        }
        with atomic_path(path) as name:
            torch.save(state, name)

    def method(self, stage: Stage) -> Method:
        """Return a stage's method with its sizes, or the layers or heads found for it."""
        method = self.methods[stage.method]
        if stage.sizes:
            return method._replace(config=method.config.replace(**dict(stage.sizes)))
        if method.fine is None:
            return method
        kind, count = method.fine
        path = self.folder / layers_of(self.size, stage.seed) / LAYERS
        units = json.loads(path.read_text(encoding="utf-8"))
        chosen = [Unit(*unit) for unit in units["layers" if kind == "layers" else "heads"][:count]]
        config = fine_config(self.size, kind, chosen)
        if kind != "duo":
            config = method.config.replace(layer_group_sizes=config.layer_group_sizes)
        return method._replace(config=config)

    def train(
        self, model: LlamaForCausalLM, stage: Stage, schedule: Schedule, **options: Any
    ) -> None:
        """Train, and keep the curve."""
        folder = self.folder / stage.name
        # The few steps from a given base end before compiling would have paid.
        is_long = self.device.startswith("cuda") and self.size.base is None
        with Fused(model, "compile" if is_long else None):
            history = train(
                model,
                self.corpus,
                schedule,
                folder,
                workers=self.workers,
                time_left=self.time_left,
                **options,
            )
        lines = [json.dumps(entry) + "\n" for entry in thinned(history)]
        with atomic_path(folder / "curve.jsonl") as name:
            Path(name).write_text("".join(lines), encoding="utf-8")

    def record(self, name: str, value: Any, method: Method, stage: Stage, **params: Any) -> Record:
        """Make a record with all that tells this measurement from others."""
        settings = method.config.to_dict() if method.config is not None else {}
        unsaid = {"backend", "patterns", "prefill"}
        if settings.get("fetch_groups"):
            settings["index"] = settings.pop("fetch_index")
        else:
            unsaid |= {"fetch_index", "fetch_share", "store"}
        settings = {
            key: setting
            for key, setting in settings.items()
            if setting not in (None, (), 0.0) and key not in unsaid
        }
        tokens = trained_tokens(self.size, stage, method)
        if tokens is not None:
            settings["trained_tokens"] = tokens
        common = {
            "model": self.size.name,
            "method": method.name,
            "stage": stage.name,
            "seed": stage.seed,
            "length": self.size.length,
        }
        return make_record(
            name, value, {**common, **settings, **params}, device=device_name(self.device)
        )

    def window_nll(self, model: LlamaForCausalLM, split: str, share: int = 1) -> np.ndarray:
        """Return the losses of a split's windows [n, L - 1]; of every `share`-th token."""
        tokens = self.size.eval_tokens // share
        return scoring.window_nll(model, self.corpus, self.size, split, self.device, tokens)

    def far(self, nll: np.ndarray) -> np.ndarray:
        """Return the second half of windows [n, L - 1]."""
        return nll[:, self.size.length // 2 - 1 :]

    def perplexity(
        self,
        model: LlamaForCausalLM,
        method: Method,
        stage: Stage,
        splits: Sequence[str],
        *,
        keep: bool = False,
        **params: Any,
    ) -> Iterator[Record]:
        """Record the perplexity of whole windows and of their far halves.

        Args:
            keep: Save each window's mean over its far half in the stage's folder.
        """
        model.eval()
        for split in splits:
            nll = self.window_nll(model, split)
            if keep:
                with atomic_path(self.path(stage, f"far_{split}.npy")) as name:
                    np.save(name, self.far(nll).mean(1))
            where = {"task": "text", "windows": len(nll), "split": split, **params}
            for bucket, losses in (("all", nll), ("far", self.far(nll))):
                value = math.exp(losses.mean(dtype=np.float64))
                yield self.record(
                    "quality.perplexity", value, method, stage, bucket=bucket, **where
                )

    def measure(
        self,
        model: LlamaForCausalLM,
        method: Method,
        stage: Stage,
        *,
        brief: bool = False,
        **params: Any,
    ) -> Iterator[Record]:
        """Record perplexity near and far, and answers by distance and length.

        Args:
            brief: Perplexity on the test split and answers at the trained length only.
        """
        splits: tuple[str, ...] = ("val", "test")
        if brief or self.size.is_brief:  # a brief size chooses nothing on validation text
            splits = ("test",)
        yield from self.perplexity(model, method, stage, splits, keep=not brief, **params)
        lengths = [self.size.length] if brief else [length for length, _ in self.size.levels]
        for length in lengths:
            yield from self._facts(model, method, stage, length)
        if not brief:
            for documents in self.size.documents:
                yield from self._passages(model, method, stage, documents)

    def _facts(
        self, model: LlamaForCausalLM, method: Method, stage: Stage, length: int
    ) -> Iterator[Record]:
        """Record answers about planted facts, of all and of those beyond the window."""
        rows = scoring.fact_rows(self.corpus, length, self.size.questions)
        answers = scoring.answers_right(model, rows, self.device, _may_pad(method))
        reach = self.size.window + self.size.group
        for distance, least in (("all", -1), ("far", reach)):
            right = [hit for tokens, hit in answers if tokens > least]
            if right:
                where = {"task": "retrieval", "distance": distance, "length": length}
                yield self._accuracy(right, method, stage, **where)

    def _passages(
        self, model: LlamaForCausalLM, method: Method, stage: Stage, documents: int
    ) -> Iterator[Record]:
        """Record answers about one of several passages."""
        for task, make_rows in (
            ("multidoc_qa", scoring.qa_rows),
            ("multidoc_planted", scoring.planted_qa_rows),
        ):
            rows = make_rows(self.corpus, self.size, documents)
            if not _may_pad(method):  # one at a time, which takes long
                rows = rows[: -(-len(rows) // 5)]
            if rows:
                answers = scoring.answers_right(model, rows, self.device, _may_pad(method))
                right = [hit for _, hit in answers]
                yield self._accuracy(right, method, stage, task=task, documents=documents)

    def _accuracy(
        self, right: Sequence[bool], method: Method, stage: Stage, **params: Any
    ) -> Record:
        share = sum(right) / len(right)
        return self.record("quality.accuracy", share, method, stage, questions=len(right), **params)


def _may_pad(method: Method) -> bool:
    """Whether rows may be padded: not under MInference, which reads the last queries."""
    return not isinstance(method.config, MInference)
