"""Measure attentions on a pretrained model, as it is or trained for a few steps: far perplexity,
needles and lists.

Each method's records are appended together, once it is measured. A method whose records are there,
of the same code and settings, is not measured again.
"""

from __future__ import annotations

import gc
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from corecontext.baselines import enabled
from corecontext.config import CCAConfig
from corecontext.data.readers import find_file, read_documents
from corecontext.eval.runner import fingerprint
from corecontext.files import UserError, cache_folder
from corecontext.heads.budget import Shape, Unit
from corecontext.heads.findings import needle_rows
from corecontext.heads.search import find_units
from corecontext.integrations.hf_attention import full_layers
from corecontext.integrations.hf_gguf import local_model
from corecontext.loading import Loaded, load, load_config, one_line
from corecontext.model_sizes import ModelSizes
from corecontext.record import (
    Record,
    append_records,
    device_name,
    make_record,
    read_records,
    source_version,
)
from corecontext.terminal import progress
from reproduction.real_attention import AttentionRun, tokens_of
from reproduction.real_gains import gain_records
from reproduction.real_hits import hit_rates
from reproduction.real_methods import (
    METHODS,
    WITH_HEADS,
    Heads,
    Sizes,
    describe,
    equal_heads,
)
from reproduction.real_tasks import LIST_TOKENS, Question, list_questions, needle_questions
from reproduction.real_texts import Window, cut_windows
from reproduction.real_training import Adaptation, Cost, RememberedTeacher, adapt

SEARCH_WINDOWS = 2
"""Windows of the search for heads that keep every token."""
TRAIN_TEXT = "lm_train"
POSITIONS = 8
"""Parts of a longer window whose perplexities are recorded."""


@dataclass(frozen=True)
class Protocol:
    """The model, the data and the measurements."""

    model: str
    data: str
    output: str
    windows: int = 32
    """Each of another document."""
    needles: int = 25
    """Of each length."""
    needle_lengths: tuple[int, ...] = (4000, 7900)
    full_heads: str | None = None
    """KV heads that keep every token, "LAYER:HEAD,..."; None searches for them."""
    lists: int = 10
    """Lists of values, of one length."""
    hit_steps: int = 0
    """Last tokens of a window that are read one by one to count hits of slots; 0 counts none."""
    head_needles: int = 0
    """Prompts by whose answers heads are searched for; 0 searches by the far halves of windows."""
    train_text: str = TRAIN_TEXT
    """Name of the file of training text."""
    save: str | None = None
    """Folder for trained models; one that is there is measured, not trained again."""
    cache: bool = True
    """Whether methods run with their caches; without, on whole texts."""
    dtype: str = "auto"
    device: str = "auto"


class RealModel:
    """A pretrained model, its texts, and the measurements of one seed."""

    def __init__(self, protocol: Protocol, sizes: Sizes, adaptation: Adaptation) -> None:
        self.protocol = protocol
        self.adaptation = adaptation
        self.folder = local_model(protocol.model)
        self.name = Path(self.folder).name.lower()
        self.hf_config = load_config(self.folder)
        self.teachers: dict[str, RememberedTeacher] = {}
        """The teacher of all methods' trainings, once there is one."""
        self.sizes = replace(sizes, head_dim=ModelSizes.of(self.hf_config).head_dim)

    # Texts, made when first needed
    # ----------------------------------------------------------------------------------------------

    @cached_property
    def original(self) -> Loaded:
        """The model as it is, under full attention."""
        return self._load(self.folder)

    @cached_property
    def test_windows(self) -> list[Window]:
        """One window of each of the first long documents of lm_test."""
        return self.windows("lm_test", self.protocol.windows, most=1)

    @cached_property
    def training_windows(self) -> list[Window]:
        """The windows of the training text that the steps need, or all that it has."""
        needed = self.adaptation.steps * self.adaptation.rows
        text = self.protocol.train_text
        windows = self.windows(text, max(needed, SEARCH_WINDOWS))
        if len(windows) < needed:
            print(f"{text} has {len(windows)} windows, repeated for {needed}", file=sys.stderr)
        return windows

    @cached_property
    def essays(self) -> str:
        """The text around needles."""
        path = find_file(self.protocol.data, ("haystack_essays",))
        return "\n\n".join(text for _, _, text in read_documents(path))

    @cached_property
    def questions(self) -> dict[tuple[str, int], list[Question]]:
        """The questions of each task and length."""
        protocol, seed = self.protocol, self.adaptation.seed
        tokenizer = self.original.tokenizer
        questions = {}
        if protocol.needles:
            for length in protocol.needle_lengths:
                questions["needles", length] = needle_questions(
                    self.essays, tokenizer, length, protocol.needles, seed
                )
        if protocol.lists:
            questions["list", LIST_TOKENS] = list_questions(
                self.essays, tokenizer, protocol.lists, seed
            )
        return questions

    @cached_property
    def heads(self) -> Heads:
        """The KV heads that keep every token: given, or searched for in the original model."""
        kv_heads = ModelSizes.of(self.hf_config).kv_heads
        shape = Shape(len(full_layers(self.hf_config)), kv_heads)
        if self.protocol.full_heads is not None:
            from corecontext.baselines.duo_attention import find_heads

            with one_line():
                by_layer = find_heads(self.protocol.full_heads, self.hf_config)
            units = (Unit(layer, head) for layer in range(shape.layers) for head in by_layer[layer])
            return Heads(shape, tuple(units))
        model = self.original.model
        options: dict[str, Any] = {"heads": True, "raw": True, "folder": cache_folder() / "heads"}
        if self.protocol.head_needles:
            rows, options["starts"] = needle_rows(
                self.original, self.essays, self.sizes.length, self.protocol.head_needles
            )
        else:
            windows = self.training_windows[:SEARCH_WINDOWS]
            rows = [tokens_of(window.ids, model) for window in windows]
        with enabled(model, self.sizes.cca()):
            count = equal_heads(self.sizes, shape)
            findings = find_units(model, rows, self.sizes.length, count, **options)
        return Heads(shape, findings.search.chosen)

    def windows(self, name: str, count: int, most: int | None = None) -> list[Window]:
        """Return the first windows of a text, at most so many of one document."""
        path = find_file(self.protocol.data, (name,))
        return cut_windows(path, self.original.tokenizer, self.sizes.length, count, most)

    def _load(self, folder: str) -> Loaded:
        return load(folder, method="full", dtype=self.protocol.dtype, device=self.protocol.device)

    # Measurements
    # ----------------------------------------------------------------------------------------------

    def run(self, methods: Sequence[str]) -> None:
        """Measure methods, and append the records of each as soon as it is measured."""
        for method in methods:
            heads = self.heads if method in WITH_HEADS else Heads(Shape(0, 0))
            with one_line():
                attention = METHODS[method](self.sizes, heads)
            params = self._params(method, attention, heads)
            if self._is_measured(params):
                print(f"{method}: measured before", file=sys.stderr)
                continue
            records = self._measure(method, attention, params)
            append_records(self.protocol.output, records)
            for record in records:
                place = f"{record.params['task']} at {record.params['length']} tokens"
                print(f"{method}: {record.name} {record.value:.4f}, {place}", flush=True)

    def _params(self, method: str, attention: Any, heads: Heads) -> dict[str, Any]:
        """Return the params of a method's records that are known before it is measured."""
        adaptation = self.adaptation
        rows = adaptation.steps * adaptation.rows
        params = {
            "model": self.name,
            "method": method,
            "trained_tokens": rows * self.sizes.length,
            **describe(attention, heads),
            "seed": adaptation.seed,
            "windows": len(self.test_windows),
            "needles": self.protocol.needles,
            "lists": self.protocol.lists,
        }
        if adaptation.steps:
            params["learning_rate"] = adaptation.learning_rate
        if self.protocol.train_text != TRAIN_TEXT:
            params["train_text"] = self.protocol.train_text
        return params | adaptation.describe()

    def _is_measured(self, params: dict[str, Any]) -> bool:
        """Whether the output has the records of these params, made by this code."""
        path = Path(self.protocol.output)
        if not path.exists():
            return False
        wanted = {**params, "length": self.sizes.length}
        commit = source_version()[0]
        return any(
            record.name == "real.perplexity"
            and record.params["task"] == "far"
            and record.commit == commit
            and all(record.params.get(name) == value for name, value in wanted.items())
            for record in read_records(path)
        )

    def _measure(self, method: str, attention: Any, params: dict[str, Any]) -> list[Record]:
        """Return the records of a method, trained first where there are steps."""
        if not self.adaptation.steps:
            return self._records(self.original, attention, params)
        parent = tempfile.TemporaryDirectory()
        if self.protocol.save is not None:
            parent = nullcontext(self.protocol.save)
        with parent as folder:
            target, costs = self.train(method, attention, params, folder)
            records = self._records(self._load(str(target)), attention, params)
        _free_memory()
        return records + costs

    def train(
        self, method: str, attention: Any, params: dict[str, Any], parent: str
    ) -> tuple[Path, list[Record]]:
        """Return the folder of the model trained under a method's attention, below `parent`, and
        its costs; none where it is there already."""
        settings = [self.name, self.sizes.length, vars(self.adaptation), params["full_heads"]]
        settings.append(self.protocol.train_text)
        weights = attention
        if isinstance(attention, CCAConfig):  # where a cache keeps tokens changes no weights
            weights = attention.replace(store=CCAConfig.store)
        target = Path(parent) / f"{method}-{fingerprint([*settings, str(weights)])}"
        if (target / "config.json").exists():
            return target, []
        cost = adapt(
            self.folder, attention, self.adaptation, self.training_windows, target, self.teachers
        )
        _free_memory()
        return target, self._cost_records(cost, params)

    def _cost_records(self, cost: Cost, params: dict[str, Any]) -> list[Record]:
        """Return the costs of a training."""
        params = {**params, "length": self.sizes.length, "task": "training"}
        device = device_name(self.original.model.device)
        return [
            make_record("real.training_s", cost.seconds, params, device=device),
            make_record("real.training_bytes", cost.peak_bytes, params, device=device),
        ]

    def _records(self, loaded: Loaded, attention: Any, params: dict[str, Any]) -> list[Record]:
        """Return far perplexity of a model under an attention, and its share of right answers in
        each task."""
        device = device_name(loaded.model.device)
        with AttentionRun(loaded, attention, use_cache=self.protocol.cache) as run:
            nll = self._nll(run)
            far = {**params, "length": self.sizes.length, "task": "far", **run.cache}
            value = math.exp(float(far_half(nll).mean()))
            records = [make_record("real.perplexity", value, far, device=device)]
            if self.adaptation.rope_theta is not None:
                for i, losses in enumerate(nll.chunk(POSITIONS)):
                    at = {**far, "task": "position", "position": f"{i + 1}/{POSITIONS}"}
                    value = math.exp(float(losses.mean()))
                    records.append(make_record("real.perplexity", value, at, device=device))
            for (task, length), questions in self.questions.items():
                share = sum(question.share_right(run) for question in questions) / len(questions)
                asked = {**params, "length": length, "task": task, **run.cache}
                records.append(make_record("real.accuracy", share, asked, device=device))
        if self.protocol.hit_steps and getattr(attention, "fetch_groups", 0):
            records += self._hit_records(loaded, attention, params)
        return records

    def _hit_records(self, loaded: Loaded, attention: Any, params: dict[str, Any]) -> list[Record]:
        """Return the hit rate of the first window by the number of slots: k, 2 k, 4 k and 8 k."""
        slots = [factor * attention.fetch_groups for factor in (1, 2, 4, 8)]
        steps = self.protocol.hit_steps
        rates = hit_rates(loaded, attention, self.test_windows[0].ids, steps, slots)
        asked = {**params, "length": self.sizes.length, "task": "hits", "steps": steps}
        device = device_name(loaded.model.device)
        return [
            make_record("real.hit_share", rate, {**asked, "slots": count}, device=device)
            for count, rate in rates.items()
        ]

    def _nll(self, run: AttentionRun) -> torch.Tensor:
        """Return the negative log-likelihood of tokens 1, 2, ..., in nats, as the mean over the
        windows [L - 1]."""
        losses = []
        with progress(f"windows of {self.sizes.length} tokens", len(self.test_windows)) as advance:
            for window in self.test_windows:
                losses.append(run.nll(window.ids).double())
                advance(1)
        return torch.stack(losses).mean(0)


def far_half(nll: torch.Tensor) -> torch.Tensor:
    """Return the losses of a window's second half: of tokens L / 2 to L - 1, from those of tokens 1
    to L - 1."""
    return nll[(len(nll) + 1) // 2 - 1 :]


def _free_memory() -> None:
    """Free the memory of models that nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def append_gains(output: str, window_size: int, *, strict: bool) -> None:
    """Append the share of full attention's gain of each measured method that has none yet.

    Args:
        window_size: The window of the sinks and window that keep 0 %.
        strict: Raise a UserError that names the missing rows; else print it.
    """
    gains, missing = gain_records(read_records(output), window_size)
    append_records(output, gains)
    for record in gains:
        print(f"{record.params['method']}: {record.name} {record.value:.4f}")
    if missing and strict:
        raise UserError(missing)
    if missing:
        print(f"gains are incomplete: {missing}", file=sys.stderr)
