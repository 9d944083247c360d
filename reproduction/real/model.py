"""Measure attentions on a pretrained model, as it is or trained for a few steps: far perplexity,
needles and lists.

Each method's records are appended together, once it is measured. A method whose records are there,
of the same code and settings, is not measured again.
"""

import gc
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.head_budget import Shape, Unit
from corecontext.baselines import enabled
from corecontext.config import PAPER_RULE, CCAConfig
from corecontext.eval.runner import fingerprint
from corecontext.integrations.hf.attention_interface import full_layers
from corecontext.loading import Loaded, load_config, one_line
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
from reproduction.head_search import find_units
from reproduction.layers import needle_rows
from reproduction.real.attention import NO_CACHE, AttentionRun, batches, tokens_of
from reproduction.real.hits import hit_rates
from reproduction.real.material import Material
from reproduction.real.measured import is_measured
from reproduction.real.methods import (
    METHODS,
    WITH_HEADS,
    Heads,
    Sizes,
    describe,
    equal_heads,
)
from reproduction.real.next_tokens import READINGS, losses_behind
from reproduction.real.tasks import LIST_TOKENS, Question, share_right
from reproduction.real.texts import Window
from reproduction.real.training import Adaptation, Cost, adapt

SEARCH_WINDOWS = 2
"""Windows of the search for heads that keep every token."""
TRAIN_TEXT = "lm_train"
HEAD_PARAMS = ("raw_heads", "full_heads", "window_size")
"""Params that a search for heads determines."""
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
    next_tokens: int = 0
    """Last tokens of a window whose losses alone are measured, behind prompts that are read in each
    way of `READINGS`; 0 measures far halves."""
    train_text: str = TRAIN_TEXT
    """Name of the file of training text."""
    save: str | None = None
    """Folder for trained models; one that is there is measured, not trained again."""
    command: str | None = None
    """The command in the records; None is this process's."""
    cache: bool = True
    """Whether the bytes of caches are measured."""
    dtype: str = "auto"
    device: str = "auto"


class RealModel:
    """A pretrained model, its texts, and the measurements of one seed.

    Args:
        material: The model and texts of other measurements in this process; None loads them.
    """

    def __init__(
        self,
        protocol: Protocol,
        sizes: Sizes,
        adaptation: Adaptation,
        material: Material | None = None,
    ) -> None:
        self.protocol = protocol
        self.adaptation = adaptation
        self.material = material or Material(
            protocol.model, protocol.data, protocol.dtype, protocol.device
        )
        self.name = self.material.name
        self.hf_config = load_config(self.material.folder)
        self.sizes = replace(sizes, head_dim=ModelSizes.of(self.hf_config).head_dim)

    # Texts, made when first needed
    # ----------------------------------------------------------------------------------------------

    @property
    def original(self) -> Loaded:
        """The model as it is, under full attention."""
        return self.material.original

    @property
    def essays(self) -> str:
        """The text around needles."""
        return self.material.essays

    @property
    def test_windows(self) -> list[Window]:
        """One window of each of the first long documents of lm_test."""
        return self.windows("lm_test", self.protocol.windows, most=1)

    @property
    def training_windows(self) -> list[Window]:
        """The windows of the training text that the steps need, or all that it has."""
        needed = self.adaptation.steps * self.adaptation.rows
        return self.windows(self.protocol.train_text, max(needed, SEARCH_WINDOWS))

    def windows(self, name: str, count: int, most: int | None = None) -> list[Window]:
        """Return the first windows of a text, at most so many of one document."""
        return self.material.windows(name, self.sizes.length, count, most)

    @cached_property
    def questions(self) -> dict[tuple[str, int], list[Question]]:
        """The questions of each task and length."""
        protocol, seed = self.protocol, self.adaptation.seed
        questions = {}
        if protocol.needles:
            for length in protocol.needle_lengths:
                needles = self.material.needles(length, protocol.needles, seed)
                questions["needles", length] = needles
        if protocol.lists:
            questions["list", LIST_TOKENS] = self.material.lists(protocol.lists, seed)
        return questions

    @cached_property
    def heads(self) -> Heads:
        """The KV heads that keep every token: given, or searched for in the original model."""
        shape = self._shape
        if self.protocol.full_heads is not None:
            from reproduction.attentions.duo_attention import find_heads

            with one_line():
                by_layer = find_heads(self.protocol.full_heads, self.hf_config)
            units = (Unit(layer, head) for layer in range(shape.layers) for head in by_layer[layer])
            return Heads(shape, tuple(units))
        model = self.original.model
        options: dict[str, Any] = {"heads": True, "raw": True}
        if self.protocol.head_needles:
            rows, options["starts"] = needle_rows(
                self.original, self.essays, self.sizes.length, self.protocol.head_needles
            )
        else:
            windows = self.training_windows[:SEARCH_WINDOWS]
            rows = [tokens_of([window.ids], model) for window in windows]
        with enabled(model, self.sizes.cca()):
            count = equal_heads(self.sizes, shape)
            findings = find_units(model, rows, self.sizes.length, count, **options)
        return Heads(shape, findings.search.chosen)

    @cached_property
    def _shape(self) -> Shape:
        """Layers and KV heads of the model."""
        kv_heads = ModelSizes.of(self.hf_config).kv_heads
        return Shape(len(full_layers(self.hf_config)), kv_heads)

    # Measurements
    # ----------------------------------------------------------------------------------------------

    def run(self, methods: Sequence[str]) -> None:
        """Measure methods, and append the records of each as soon as it is measured."""
        for method in methods:
            path = Path(self.protocol.output)
            records = read_records(path) if path.exists() else []
            commit = source_version()[0]
            same_code = [record for record in records if record.commit == commit]
            if is_measured(self._params(method), same_code):
                print(f"{method}: measured before", file=sys.stderr)
                continue
            self.measure(method)

    def measure(self, method: str) -> None:
        """Train the model under a method where there are steps, measure it, and append the
        records."""
        attention = self._attention(method)
        params = self._params(method)
        if not self.adaptation.steps:
            self._append(self._records(self.original, attention, params))
            return
        parent = tempfile.TemporaryDirectory()
        if self.protocol.save is not None:
            parent = nullcontext(self.protocol.save)
        with parent as folder:
            target, costs = self.train(method, folder)
            self._append(costs)
            self._append(self._records(self.material.load(str(target)), attention, params))
        free_memory()

    def is_published(self, method: str, records: Sequence[Record]) -> bool:
        """Whether a method has records, made by any code; no model is loaded for it."""
        if method not in WITH_HEADS or self.protocol.full_heads is not None:
            return is_measured(self._params(method, self.protocol.windows), records)
        # Its heads are not yet searched for.
        params = self._params(method, self.protocol.windows, Heads(self._shape))
        return is_measured(params, records, but=HEAD_PARAMS)

    def is_trained(self, method: str) -> bool:
        """Whether a method's trained model is saved, as far as its heads need no search."""
        save = self.protocol.save
        if save is None or (method in WITH_HEADS and self.protocol.full_heads is None):
            return False
        return (self.target(method, save) / "config.json").exists()

    def train(self, method: str, parent: str) -> tuple[Path, list[Record]]:
        """Return the folder of the model trained under a method, below `parent`, and its costs;
        none where it is there already."""
        target = self.target(method, parent)
        if (target / "config.json").exists():
            return target, []
        material = self.material
        if self.adaptation.rope_theta is not None:
            # Nobody teaches it, and a teacher's memory would count as the training's.
            material.teachers.clear()
            free_memory()
        arguments = (self.adaptation, self.training_windows, target, material.teachers)
        cost = adapt(material.folder, self._attention(method), *arguments)
        free_memory()
        return target, self._cost_records(cost, self._params(method))

    def target(self, method: str, parent: str) -> Path:
        """Return the folder of the model trained under a method."""
        heads = self._heads_of(method)
        weights = attention = self._attention(method)
        if isinstance(attention, CCAConfig):  # where a cache keeps tokens changes no weights
            weights = attention.replace(store=PAPER_RULE["store"])
        full_heads = describe(attention, heads)["full_heads"]
        settings = [self.name, self.sizes.length, vars(self.adaptation), full_heads]
        settings.append(self.protocol.train_text)
        return Path(parent) / f"{method}-{fingerprint([*settings, str(weights)])}"

    def _heads_of(self, method: str) -> Heads:
        """Return the KV heads that keep every token, none for methods without them."""
        return self.heads if method in WITH_HEADS else Heads(Shape(0, 0))

    def _attention(self, method: str, heads: Heads | None = None) -> Any:
        """Return the settings of a method."""
        with one_line():
            return METHODS[method](self.sizes, heads or self._heads_of(method))

    def _params(
        self, method: str, windows: int | None = None, heads: Heads | None = None
    ) -> dict[str, Any]:
        """Return the params of a method's records that are known before it is measured.

        Args:
            windows: Windows of the test text; None counts them.
            heads: KV heads that keep every token; None for those of the method.
        """
        adaptation = self.adaptation
        heads = heads or self._heads_of(method)
        params = {
            "model": self.name,
            "method": method,
            "trained_tokens": adaptation.steps * adaptation.rows * self.sizes.length,
            **describe(self._attention(method, heads), heads),
            "seed": adaptation.seed,
            "windows": windows or len(self.test_windows),
            "needles": self.protocol.needles,
            "lists": self.protocol.lists,
            "length": self.sizes.length,
        }
        if adaptation.steps:
            params["learning_rate"] = adaptation.learning_rate
        if self.protocol.train_text != TRAIN_TEXT:
            params["train_text"] = self.protocol.train_text
        if self.protocol.head_needles and method in WITH_HEADS:
            params["head_needles"] = self.protocol.head_needles
        if self.protocol.next_tokens:
            params["next_tokens"] = self.protocol.next_tokens
        return params | adaptation.describe()

    def _record(self, name: str, value: float, params: dict[str, Any]) -> Record:
        """Make a record of this model's device and of the row's command."""
        device = device_name(self.original.model.device)
        return make_record(name, value, params, device=device, command=self.protocol.command)

    def _append(self, records: Sequence[Record]) -> None:
        """Append records to the output, and print them."""
        append_records(self.protocol.output, records)
        for record in records:
            p = record.params
            place = f"{p['task']} at {p['length']} tokens"
            print(f"{p['method']}: {record.name} {record.value:.4f}, {place}", flush=True)

    def _cost_records(self, cost: Cost, params: dict[str, Any]) -> list[Record]:
        """Return the costs of a training."""
        params = {**params, "task": "training"}
        return [
            self._record("real.training_s", cost.seconds, params),
            self._record("real.training_bytes", cost.peak_bytes, params),
        ]

    def _records(self, loaded: Loaded, attention: Any, params: dict[str, Any]) -> list[Record]:
        """Return far perplexity of a model under an attention, and its share of right answers in
        each task; or the perplexity of the last tokens alone."""
        if self.protocol.next_tokens:
            return self._next_records(loaded, attention, params)
        with AttentionRun(loaded, attention) as run:
            nll = self._nll(run)
            far = {**params, "task": "far", **self._cache_size(run, self.test_windows[-1].ids)}
            value = math.exp(float(far_half(nll).mean()))
            records = [self._record("real.perplexity", value, far)]
            if self.adaptation.rope_theta is not None:
                for i, losses in enumerate(nll.chunk(POSITIONS)):
                    at = {**far, "task": "position", "position": f"{i + 1}/{POSITIONS}"}
                    value = math.exp(float(losses.mean()))
                    records.append(self._record("real.perplexity", value, at))
            for (task, length), questions in self.questions.items():
                asked = {**params, "length": length, "task": task}
                asked |= self._cache_size(run, questions[-1].ids)
                share = share_right(run, questions)
                records.append(self._record("real.accuracy", share, asked))
        if self.protocol.hit_steps and getattr(attention, "fetch_groups", 0):
            records += self._hit_records(loaded, attention, params)
        return records

    def _next_records(self, loaded: Loaded, attention: Any, params: dict[str, Any]) -> list[Record]:
        """Return the perplexity of the last tokens of windows, under fetch for each reading of the
        tokens before them."""
        count = self.protocol.next_tokens
        losses: dict[str | None, torch.Tensor] = {}
        if getattr(attention, "fetch_groups", 0):
            for name, reading in READINGS.items():
                behind = partial(losses_behind, loaded.model, attention, reading, count)
                losses[name] = self._mean(behind)
        else:
            with AttentionRun(loaded, attention) as run:
                losses[None] = self._nll(run)[1 - count :]
        return [
            self._record(
                "real.next_perplexity",
                math.exp(float(nll.mean())),
                {**params, "task": "next", "prompt": name},
            )
            for name, nll in losses.items()
        ]

    def _hit_records(self, loaded: Loaded, attention: Any, params: dict[str, Any]) -> list[Record]:
        """Return the hit rate of the first window by the number of slots."""
        k = attention.fetch_groups
        slots = [k, 3 * k // 2, 2 * k, 4 * k]
        steps = self.protocol.hit_steps
        rates = hit_rates(loaded, attention, self.test_windows[0].ids, steps, slots)
        asked = {**params, "task": "hits", "steps": steps}
        return [
            self._record("real.hit_share", rate, {**asked, "slots": count})
            for count, rate in rates.items()
        ]

    def _nll(self, run: AttentionRun) -> torch.Tensor:
        """Return the negative log-likelihood of tokens 1, 2, ..., in nats, as the mean over the
        windows [L - 1]."""
        return self._mean(run.nll)

    def _mean(self, losses_of: Callable[[Sequence[Any]], torch.Tensor]) -> torch.Tensor:
        """Return the mean losses over the windows, which are read in batches."""
        windows = [window.ids for window in self.test_windows]
        losses = []
        with progress(f"windows of {self.sizes.length} tokens", len(windows)) as advance:
            for batch in batches(windows, self.sizes.length):
                losses.append(losses_of(batch).double())
                advance(len(batch))
        return torch.cat(losses).mean(0)

    def _cache_size(self, run: AttentionRun, ids: Iterable[int]) -> dict[str, int | None]:
        """Return the bytes of the cache after a text, None where they are not measured."""
        return run.cache_size(ids) if self.protocol.cache else NO_CACHE


def far_half(nll: torch.Tensor) -> torch.Tensor:
    """Return the losses of a window's second half: of tokens L / 2 to L - 1, from those of tokens 1
    to L - 1."""
    return nll[(len(nll) + 1) // 2 - 1 :]


def free_memory() -> None:
    """Free the memory of models that nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
