"""Compare indices of fetch on a pretrained model: recall of the groups with the largest masses, far
perplexity and needles, untrained or learned."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from corecontext.baselines import enabled
from corecontext.baselines.method import Call
from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, cache_bytes
from corecontext.ops.fetch.choice import choose, to_marks
from corecontext.ops.fetch.index import index_of
from corecontext.ops.fetch.scoring import Queries, centre_of, scores
from corecontext.ops.spec import Spec
from corecontext.perplexity import hidden_nll
from corecontext.record import Record, append_records, device_name, make_record
from reproduction.index_methods import LearnedFetch, Shown
from reproduction.index_training import LayerIndex, Projections, Sample, groups_of, sees_groups
from reproduction.real import TRAIN_TEXT, RealModel, far_half
from reproduction.real_attention import tokens_of
from reproduction.real_methods import Heads, Shape, describe
from reproduction.real_tasks import Question

QUERIES = 64
"""Queries of a layer and window whose choices are compared."""


SHOWN_STEPS = 20
"""Steps at both ends of a training whose mean divergence is shown."""
SAMPLED = 512
"""Queries of a layer and window that an index learns from."""


@dataclass(frozen=True)
class Learning:
    """The training of indices of projected keys."""

    rank: int = 32
    """Elements of a projected key."""
    steps: int = 300
    """0 leaves the projections at the principal directions."""
    windows: int = 8
    """Windows of lm_train, each of another document."""
    length: int = 8192
    """Most tokens of one."""


class IndexStudy:
    """Measurements of indices on one model.

    Args:
        real: The model and its texts.
        rows: Windows or prompts of a forward pass.
    """

    def __init__(self, real: RealModel, rows: int) -> None:
        self.real = real
        self.rows = rows
        self.model = real.original.model
        self.cost = ModelCost.of(self.model.config, self.model)
        self._captured: dict[tuple[int, int, int], list[list[Sample]]] = {}

    def projected(self, config: CCAConfig, learning: Learning) -> list[LearnedFetch]:
        """Return fetch by keys projected onto their principal directions, and, with steps, by
        projections that have learned from there."""
        spec = self._spec(config)
        generator = torch.Generator().manual_seed(self.real.adaptation.seed)
        first: list[Projections] = []
        last: list[Projections] = []
        divergences: list[list[float]] = []
        for samples in self._samples(learning.windows, learning.length, 2 * config.window_size):
            layer = LayerIndex(samples, learning.rank, config.fetch_index, spec)
            first.append(layer.projections.detached())
            layer.learn(learning.steps, generator)
            last.append(layer.projections.detached())
            divergences.append(layer.losses)
        settings = [LearnedFetch(config, tuple(first), 0, learning.windows)]
        if learning.steps:
            settings.append(LearnedFetch(config, tuple(last), learning.steps, learning.windows))
            ends = [
                fmean(fmean(losses[part]) for losses in divergences)
                for part in (slice(SHOWN_STEPS), slice(-SHOWN_STEPS, None))
            ]
            print(
                f"{config.fetch_index} of {learning.rank} elements: divergence {ends[0]:.4f} in "
                f"the first {SHOWN_STEPS} steps, {ends[1]:.4f} in the last",
                flush=True,
            )
        return settings

    def _samples(self, windows: int, length: int, first: int) -> list[list[Sample]]:
        """Return the samples of each layer: queries behind `first` tokens, and all keys, of texts
        that full attention reads once for all indices."""
        settings = (windows, length, first)
        if settings not in self._captured:
            self._captured = {settings: self._capture(*settings)}
        return self._captured[settings]

    def _capture(self, windows: int, length: int, first: int) -> list[list[Sample]]:
        """Read texts under full attention, and return the samples of each layer."""
        layers: dict[int, list[Sample]] = defaultdict(list)
        generator = torch.Generator().manual_seed(self.real.adaptation.seed)

        def look(call: Call) -> None:
            layer = call.layer.full_index
            if not layer:  # queries of all layers are at the same positions
                last = call.q.shape[2]
                start = min(first, last // 2)
                chosen = torch.randint(start, last, (SAMPLED,), generator=generator)
                places.append(chosen.sort().values.to(call.q.device))
            q = by_kv_head(call)[:, :, places[-1]]
            # Parameters of another mode than inference.
            layers[layer].append(Sample(q.clone(), places[-1], call.k[0].clone()))

        places: list[Tensor] = []
        for window in self.real.windows(TRAIN_TEXT, windows, most=1):
            self._show(window.ids[:length], look)
        return [layers[i] for i in range(len(layers))]

    def recall(self, settings: Sequence[CCAConfig | LearnedFetch], windows: int) -> list[Record]:
        """Return the share of the k groups with the largest masses that each index chooses, in the
        far halves of windows read by full attention."""
        shares: dict[int, list[float]] = defaultdict(list)

        def look(call: Call) -> None:
            length = call.q.shape[2]
            place = torch.linspace(length // 2, length - 1, QUERIES, device=call.q.device).long()
            for number, setting in enumerate(settings):
                shares[number].append(self._recall_of(setting, call, place))

        for window in self.real.test_windows[:windows]:
            self._show(window.ids, look)
        records = []
        for number, setting in enumerate(settings):
            params = self._params(setting, self.real.sizes.length, "recall")
            params["windows"] = windows
            mean = sum(shares[number]) / len(shares[number])
            records.append(self._append("real.recall", mean, params))
        return records

    def _recall_of(self, setting: CCAConfig | LearnedFetch, call: Call, place: Tensor) -> float:
        """Return the recall of one layer and window."""
        config = config_of(setting)
        spec = self._spec(config).replace(rotary=call.rotary)
        q = by_kv_head(call).float()
        k = call.k[0].float()
        q = q[:, :, place]
        visible = sees_groups(place, groups_of(k, spec).shape[1], spec)
        marks = []
        measured = index_of(config.fetch_index)
        if isinstance(setting, LearnedFetch):
            measured = setting.index_of(call.layer.full_index)
        for index in (index_of("oracle"), measured):
            spec = spec.replace(fetch_index=index)
            centre = centre_of(k, spec)
            stored = index.encode(groups_of(k, spec), centre)
            estimates = scores(stored, Queries.of(q, index, centre), spec)
            numbers = choose(estimates, visible, spec.fetch_groups)
            marks.append(to_marks(numbers, visible.shape[1]))
        return float((marks[0] & marks[1]).sum() / marks[0].sum())

    def measure(self, setting: CCAConfig | LearnedFetch | None, windows: int) -> list[Record]:
        """Return far perplexity of so many windows, and the share of right answers of each task,
        under a setting or, for None, full attention."""
        records = []
        attention = nullcontext() if setting is None else enabled(self.model, setting)
        with torch.inference_mode(), attention:
            if windows:
                texts = [list(window.ids) for window in self.real.test_windows[:windows]]
                losses = [hidden_nll(self.model, hidden, ids) for hidden, ids in self._read(texts)]
                value = math.exp(float(far_half(torch.stack(losses).double().mean(0)).mean()))
                params = self._params(setting, self.real.sizes.length, "far")
                records.append(self._append("real.perplexity", value, params))
            for (task, length), questions in self.real.questions.items():
                share = self._share_right(questions)
                params = self._params(setting, length, task)
                records.append(self._append("real.accuracy", share, params))
        return records

    def _share_right(self, questions: Sequence[Question]) -> float:
        """Return the share of the facts that the model knows, first choices as answers."""
        head = self.model.get_output_embeddings()
        total = 0.0
        for question, (hidden, ids) in zip(questions, self._read([x.ids for x in questions])):
            first = question.places[0].start
            right = head(hidden[:, first - 1 : -1]).argmax(-1) == ids[:, first:]
            total += question.share_of(right[0].cpu())
        return total / len(questions)

    def _read(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the last hidden states [1, L, C] and the tokens [1, L] of each text, some read at
        once; no token sees the padding behind it."""
        for start in range(0, len(texts), self.rows):
            batch = texts[start : start + self.rows]
            longest = max(map(len, batch))
            padded = tokens_of(
                [[*text, *[0] * (longest - len(text))] for text in batch], self.model
            )
            hidden = self.model.get_decoder()(padded, use_cache=False).last_hidden_state
            for i, text in enumerate(batch):
                yield hidden[i : i + 1, : len(text)], padded[i : i + 1, : len(text)]

    def _show(self, ids: Any, look: Any) -> None:
        """Read a text by full attention, and show each layer's call."""
        with torch.no_grad(), enabled(self.model, Shown(look)):
            self.model.get_decoder()(tokens_of([ids], self.model), use_cache=False)

    def _spec(self, config: CCAConfig) -> Spec:
        """Return the settings of the operator, without a rotation of core keys."""
        scale = self.cost.head_dim**-0.5
        return Spec.of(config.replace(core_position="token"), None, scale)

    def _params(
        self, setting: CCAConfig | LearnedFetch | None, length: int, task: str
    ) -> dict[str, Any]:
        """Return the params of a record."""
        real = self.real
        params = {"model": real.name, "method": "full", "trained_tokens": 0}
        params |= describe(None if setting is None else config_of(setting), Heads(Shape(0, 0)))
        device_bytes, host_bytes = self._bytes(setting, length)
        if setting is not None:
            params["method"] = "fetch_equal_bytes" if params["store"] == "host" else "fetch"
        if isinstance(setting, LearnedFetch):
            kind = "learned" if setting.steps else "projected"
            params["index"] = f"{kind}:{setting.rank}:{params['index']}"
            params["index_steps"] = setting.steps
            params["index_windows"] = setting.windows
        params |= {"seed": real.adaptation.seed, "windows": len(real.test_windows)}
        params |= {"needles": real.protocol.needles, "lists": real.protocol.lists}
        params |= {"length": length, "task": task}
        return params | {"device_bytes": device_bytes, "host_bytes": host_bytes}

    def _bytes(self, setting: CCAConfig | LearnedFetch | None, length: int) -> tuple[int, int]:
        """Return the bytes of a cache of so many tokens on the device and in host memory."""
        cost = self.cost
        if setting is None:
            return cache_bytes(
                length, cost.num_layers, cost.kv_heads, cost.head_dim, cost.itemsize
            ), 0
        config = config_of(setting)
        sizes = cost.config_bytes(config, length)
        if isinstance(setting, CCAConfig):
            return sizes.device, sizes.host
        index = index_of(config.fetch_index)
        whole, projected = (
            index.num_bytes(config.group_size, dim, cost.itemsize)
            for dim in (cost.head_dim, setting.rank)
        )
        groups = (length - config.sink_size) // config.group_size
        saved = cost.num_layers * cost.kv_heads * groups * (whole - projected)
        return sizes.device - saved, sizes.host

    def _append(self, name: str, value: float, params: dict[str, Any]) -> Record:
        record = make_record(name, value, params, device=device_name(self.model.device))
        append_records(self.real.protocol.output, [record])
        print(
            f"{params['index'] or 'full attention'}, g {params['group_size']}, "
            f"k {params['fetch_groups']}: {name} "
            f"{value:.4f}, {params['task']} at {params['length']} tokens",
            flush=True,
        )
        return record


def config_of(setting: CCAConfig | LearnedFetch) -> CCAConfig:
    """Return the settings of fetch."""
    return setting.config if isinstance(setting, LearnedFetch) else setting


def by_kv_head(call: Call) -> Tensor:
    """Return the queries of a call with one row by KV head [N, r, T, D]."""
    return call.q[0].unflatten(0, (call.k.shape[1], -1))
