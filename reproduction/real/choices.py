"""Measure rules of choosing groups on a pretrained model: gain kept, groups read, and needles."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from corecontext.baselines.sink_methods import StreamingLLM
from corecontext.config import CCAConfig
from corecontext.model_sizes import ModelSizes
from corecontext.record import append_records, device_name, make_record
from reproduction.real.attention import AttentionRun, batches
from reproduction.real.choice_rules import Chooser, Rule
from reproduction.real.gains import gain_kept
from reproduction.real.material import Material
from reproduction.real.methods import Sizes
from reproduction.real.model import far_half
from reproduction.real.tasks import Question, share_right
from reproduction.real.texts import Window

WINDOW = Sizes.window_size
"""Of the sinks and window that keep 0 %."""


class ChoiceStudy:
    """Measurements of rules on one model, under `default` but for the rule.

    Args:
        texts: Windows of one length.
        output: File that records are appended to.
    """

    def __init__(self, material: Material, texts: Sequence[Window], output: str) -> None:
        self.material = material
        self.loaded = material.original
        self.texts = [text.ids for text in texts]
        self.output = output

    def gains(self, rules: Iterable[Rule]) -> None:
        """Append the share of full attention's gain over sinks and window that each rule keeps."""
        window = self._perplexity(StreamingLLM(Sizes.sink_size, WINDOW))
        full = self._perplexity(None)
        for rule in rules:
            chooser = self._chooser(rule)
            with chooser.enabled():
                value = self._perplexity(_config(rule))
            gain = gain_kept(value, window, full)
            params = {"length": len(self.texts[0]), "windows": len(self.texts)}
            ends = {"over": WINDOW, "of": [window, value, full]}
            self._append("choices.gain_kept", gain, chooser, {**params, **ends})

    def needles(self, rules: Iterable[Rule], questions: Sequence[Question], length: int) -> None:
        """Append the share of right answers by each rule to questions of a length."""
        for rule in rules:
            chooser = self._chooser(rule)
            with chooser.enabled(), AttentionRun(self.loaded, _config(rule)) as run:
                share = share_right(run, questions)
            params = {"length": length, "task": "needles", "needles": len(questions)}
            self._append("choices.accuracy", share, chooser, params)

    def _chooser(self, rule: Rule) -> Chooser:
        return Chooser(rule, ModelSizes.of(self.loaded.model.config).kv_heads)

    def _perplexity(self, attention: Any) -> float:
        """Return the perplexity of the far halves of the texts under an attention."""
        with AttentionRun(self.loaded, attention) as run:
            losses = [run.nll(batch) for batch in batches(self.texts, len(self.texts[0]))]
        return math.exp(float(far_half(torch.cat(losses).double().mean(0)).mean()))

    def _append(self, name: str, value: float, chooser: Chooser, params: dict[str, Any]) -> None:
        """Append a record of a rule, and print it."""
        rule = chooser.rule
        config = _config(rule)
        sizes = ("group_size", "window_size", "sink_size", "fetch_index")
        params = {
            "model": self.material.name,
            **rule.params(),
            "mean_groups": chooser.mean_groups,
            **{size: getattr(config, size) for size in sizes},
            **params,
        }
        device = device_name(self.loaded.model.device)
        append_records(self.output, [make_record(name, value, params, device=device)])
        print(f"{rule.params()}: {name} {value:.4f}, {chooser.mean_groups:.1f} groups", flush=True)


def _config(rule: Rule) -> CCAConfig:
    """Return the settings under which a rule chooses."""
    return CCAConfig.preset("default", fetch_slots=0, fetch_groups=rule.fetch_groups)
