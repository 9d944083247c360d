"""Compare indices of fetch on a pretrained model: recall of the groups with the largest masses, far
perplexity and needles."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from corecontext.baselines import enabled
from corecontext.baselines.method import Call, Method
from corecontext.config import CCAConfig
from corecontext.cost import ModelCost, cache_bytes
from corecontext.ops.fetch.choice import choose, to_marks
from corecontext.ops.fetch.index import index_of
from corecontext.ops.fetch.scoring import Queries, centre_of, scores
from corecontext.ops.spec import Spec
from corecontext.perplexity import hidden_nll
from corecontext.record import Record, append_records, device_name, make_record
from corecontext.visibility import sees_core
from reproduction.real.attention import tokens_of
from reproduction.real.methods import Heads, Shape, describe
from reproduction.real.model import RealModel, far_half
from reproduction.real.tasks import Question

QUERIES = 64
"""Queries of a layer and window whose choices are compared."""


@dataclass(frozen=True)
class Shown(Method):
    """Full attention to whole texts that shows each layer's queries, keys and values; models with
    a softcap have another."""

    name: ClassVar[str] = "shown"
    needs_rotary = True
    look: Callable[[Call], None]

    def attend(self, call: Call) -> Tensor:
        """Call `look`, and attend to all tokens."""
        self.look(call)
        return scaled_dot_product_attention(
            *call[:3], is_causal=True, scale=call.scoring.scale, enable_gqa=True
        )


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

    def recall(self, settings: Sequence[CCAConfig], windows: int) -> list[Record]:
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

    def _recall_of(self, setting: CCAConfig, call: Call, place: Tensor) -> float:
        """Return the recall of one layer and window."""
        spec = self._spec(setting).replace(rotary=call.rotary)
        q = by_kv_head(call).float()
        k = call.k[0].float()
        q = q[:, :, place]
        visible = sees_groups(place, groups_of(k, spec).shape[1], spec)
        marks = []
        for index in (index_of("oracle"), index_of(setting.fetch_index)):
            spec = spec.replace(fetch_index=index)
            centre = centre_of(k, spec)
            stored = index.encode(groups_of(k, spec), centre)
            estimates = scores(stored, Queries.of(q, index, centre), spec)
            numbers = choose(estimates, visible, spec.fetch_groups)
            marks.append(to_marks(numbers, visible.shape[1]))
        return float((marks[0] & marks[1]).sum() / marks[0].sum())

    def measure(self, setting: CCAConfig | None, windows: int) -> list[Record]:
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

    def _params(self, setting: CCAConfig | None, length: int, task: str) -> dict[str, Any]:
        """Return the params of a record."""
        real = self.real
        params = {"model": real.name, "method": "full", "trained_tokens": 0}
        params |= describe(setting, Heads(Shape(0, 0)))
        device_bytes, host_bytes = self._bytes(setting, length)
        if setting is not None:
            params["method"] = "fetch_equal_bytes" if params["store"] == "host" else "fetch"
        params |= {"seed": real.adaptation.seed, "windows": len(real.test_windows)}
        params |= {"needles": real.protocol.needles, "lists": real.protocol.lists}
        params |= {"length": length, "task": task}
        return params | {"device_bytes": device_bytes, "host_bytes": host_bytes}

    def _bytes(self, setting: CCAConfig | None, length: int) -> tuple[int, int]:
        """Return the bytes of a cache of so many tokens on the device and in host memory."""
        cost = self.cost
        if setting is None:
            return cache_bytes(
                length, cost.num_layers, cost.kv_heads, cost.head_dim, cost.itemsize
            ), 0
        return cost.config_bytes(setting, length)

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


def by_kv_head(call: Call) -> Tensor:
    """Return the queries of a call with one row by KV head [N, r, T, D]."""
    return call.q[0].unflatten(0, (call.k.shape[1], -1))


def groups_of(k: Tensor, spec: Spec) -> Tensor:
    """Return the groups [N, M, g, D] of raw keys [N, S, D] behind the first tokens kept raw."""
    count = (k.shape[1] - spec.sinks) // spec.group_size
    end = spec.sinks + count * spec.group_size
    return k[:, spec.sinks : end].unflatten(1, (count, spec.group_size))


def sees_groups(position: Tensor, count: int, spec: Spec) -> Tensor:
    """Return which of `count` groups behind the first tokens queries see, [T, M]."""
    groups = torch.arange(count, device=position.device) + spec.sinks // spec.group_size
    return sees_core(groups, position[:, None], spec.group_size, spec.window_size)
