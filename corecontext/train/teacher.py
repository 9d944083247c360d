"""The teacher of a distilled run: the original model under full attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from corecontext.inference.fuse import Fused
from corecontext.integrations.hf.logits_head import LogitRule
from corecontext.integrations.hf.rotation import fix_rotation
from corecontext.integrations.hf.weights import check_finite, load_weights
from corecontext.loading import load_config, one_line
from corecontext.train.loss import Taught
from corecontext.train.train_config import TrainConfig


def load_teacher(config: TrainConfig, *, bfloat16: bool, device: torch.device) -> Teacher:
    """Return the teacher: the model at `config.model`, also in a continued run.

    Its config is that of the checkpoint: with the run's rotary base or other settings, which the
    student learns, it would predict worse.

    Args:
        bfloat16: Whether the arithmetic, and so the weights, are bfloat16; float32 otherwise.

    Raises:
        UserError: the weights are missing or do not fit.
    """
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    with one_line(f"model '{config.model}' cannot be loaded"):
        model = load_weights(config.model, load_config(config.model), dtype)
        check_finite(model, config.model)
    fix_rotation(model, config.context_length)
    return Teacher(model.to(device), config.distil, "compile" if config.fuse else None)


class Teacher:
    """A frozen model under full attention.

    `share` is the weight of the divergence from it in each token's loss; `fuse` "compile" compiles
    its norms, MLPs and rotations, None nothing.
    """

    def __init__(self, model: PreTrainedModel, share: float, fuse: str | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.share = share
        self._fused = Fused(self.model, fuse)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, **unused: Any) -> Taught:
        """Return the last hidden states of rows [B, L], T = B L tokens, with the teacher's head.

        Positions restart at 0 in each document. Documents run one by one: together they would need
        an L x L mask. `unused` are arguments that peft passes on although they were not given.
        """
        hidden = []
        # The weights already have the dtype of the arithmetic.
        with self._fused, torch.autocast(self.model.device.type, enabled=False):
            for row, positions in zip(input_ids, position_ids):
                starts = (positions == 0).nonzero()[:, 0].tolist()
                for start, end in zip(starts, [*starts[1:], len(row)]):
                    document = row[None, start:end]
                    output = self.model.base_model(document, use_cache=False)
                    hidden.append(output.last_hidden_state[0])
        return self.view(torch.cat(hidden))

    def view(self, hidden: Tensor) -> Taught:
        """Return these last hidden states [T, d'] with the head; they are scaled so that their
        products are the logits, before a softcap."""
        head = self.model.get_output_embeddings().weight
        rule = LogitRule.of(self.model.config)
        return Taught(rule.divided(hidden), head, self.share, rule.softcap)
