"""The teacher of a distilled run: the model as it was before any training, under full attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from corecontext.inference.fuse import Fused
from corecontext.loading import load_config, one_line
from corecontext.train.loss import Taught
from corecontext.train.train_config import TrainConfig


def load_teacher(config: TrainConfig, *, bfloat16: bool, device: torch.device) -> Teacher:
    """What lies at `config.model`, which also a continued run reads again, never a checkpoint.

    Its config is the model's own: a new rotary base or other settings are the student's, who learns
    them, while the teacher would predict worse under what it was not trained with.

    Args:
        bfloat16: Whether the arithmetic is, and so the weights; float32 otherwise.

    Raises:
        UserError: the weights are missing or do not fit.
    """
    from transformers import AutoModelForCausalLM

    from corecontext.integrations.transformers import full_attention

    with one_line(f"model '{config.model}' cannot be loaded"):
        model = AutoModelForCausalLM.from_pretrained(
            config.model,
            attn_implementation=full_attention(load_config(config.model)),
            dtype=torch.bfloat16 if bfloat16 else torch.float32,
        )
    return Teacher(model.to(device), config.distil, "compile" if config.fuse else None)


class Teacher:
    """A model under full attention, frozen, and its share of the loss; `fuse` as in `Fused`."""

    def __init__(self, model: PreTrainedModel, share: float, fuse: str | None = None) -> None:
        self.model, self.share = model.eval().requires_grad_(False), share
        self._fused = Fused(self.model, fuse)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position_ids: Tensor, **empty: Any) -> Taught:
        """The teacher's view of rows [B, L] whose positions begin again with each document.

        Each document is run by itself: a mask that keeps them apart has L x L entries, and none is
        needed so. `empty` are arguments that peft passes on though nobody gave them.
        """
        head, settings, parts = self.model.get_output_embeddings().weight, self.model.config, []
        with (
            self._fused,
            torch.autocast(head.device.type, enabled=False),
        ):  # its weights have the dtype already
            for row, positions in zip(input_ids, position_ids):
                edges = [*(positions == 0).nonzero()[:, 0].tolist(), len(row)]
                parts += [
                    self.model.base_model(row[None, first:end], use_cache=False).last_hidden_state[
                        0
                    ]
                    for first, end in zip(edges, edges[1:])
                ]
        return Taught(
            torch.cat(parts), head, self.share, getattr(settings, "final_logit_softcapping", None)
        )
