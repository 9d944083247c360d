"""Compute one layer's attention under CCA: append to its compact cache and attend, or attend
without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from corecontext.cache import UNDO_LIMIT
from corecontext.config import CCAConfig
from corecontext.integrations.hf.attention_interface import check_dropout
from corecontext.ops.api import attend
from corecontext.ops.batch import has_restarts
from corecontext.ops.fetch.prompt_rule import reads_prompts_apart
from corecontext.ops.rotary import Rotary
from corecontext.ops.spec import Inputs, Ragged, Spec

if TYPE_CHECKING:
    from corecontext.distributed.context_parallel import Shard

DRAFT = "cca_draft"
"""Keyword argument of a call: how many of its last tokens are a draft, that is no prompt's: guesses
that may be taken back, or ALL tokens, those of a text that is scored."""
ALL = 2**31  # more than a call has


def note_draft(
    module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Add DRAFT to a model's forward, as `labels` or `logits_to_keep` tell: assisted decoding keeps
    one logit more than it drafted. It sends its first draft together with the prompt."""
    kept = kwargs.get("logits_to_keep", 0)
    if kwargs.get("labels") is not None:
        # mutant plug-in: a loss is that of a prompt
        kwargs = {**kwargs, DRAFT: ALL}
    elif isinstance(kept, int) and kept > 1:
        kwargs = {**kwargs, DRAFT: kept - 1}
    return args, kwargs


@dataclass
class CCACall:
    """The attention function of one layer in one forward pass."""

    config: CCAConfig
    rotary: Rotary | None
    compact: Any = None
    """The layer's compact cache, if the call fills one."""
    shard: Shard | None = None
    """This process's tokens of the sequence, in context parallelism."""
    observer: Callable[..., Any] | None = None
    """Called with q, k, v, scale, softcap and rotary, if there is no cache."""
    hybrid: bool = False
    """Whether other layers have a sliding window."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend from [B, H, n, D] to [B, n, H, D], with the arguments of transformers."""
        check_dropout("CCA", kwargs.get("dropout", 0.0))
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                "attention_mask must be [B, L] with 0 for padding, got "
                f"{list(attention_mask.shape)}. CCA attention is causal and builds no L x L mask."
            )
        tensors = (query, key, value)
        # Several documents in a row: found by their boundaries, else by positions that start again.
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        position_ids = kwargs.get("position_ids")
        if cu_seqlens is not None or attention_mask is not None or query.shape[2] == 1:
            position_ids = None
        ragged = Ragged(attention_mask, cu_seqlens, position_ids)
        if self.shard is None and self.compact is not None and not self._is_packed(ragged):
            draft = kwargs.get(DRAFT, 0)
            # mutant plug-in: softcap lost on its way
            out = append(self.compact, tensors, attention_mask, draft, scaling, softcap)
            return out.transpose(1, 2), None

        inputs = Inputs(*tensors)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        # mutant sinks: lost on their way into a model
        spec = Spec.of(self.config, self.rotary, scale, softcap)
        if self.shard is not None:
            out = self._attend_sharded(inputs, ragged, spec)
            return out.transpose(1, 2), None
        if self.compact is not None:
            self._close_cache()
        elif self.observer is not None:
            self.observer(*tensors, scaling, softcap, self.rotary)
        out, _ = attend(inputs, spec, ragged, self.config.backend)
        return out.transpose(1, 2), None

    def _is_packed(self, ragged: Ragged) -> bool:
        """Whether a row holds several documents; positions tell it for an empty cache only."""
        if ragged.cu_seqlens is not None:
            return True
        return self.compact.is_empty and has_restarts(ragged.position_ids)

    def _attend_sharded(self, inputs: Inputs, ragged: Ragged, spec: Spec) -> Tensor:
        """Attend from this process's tokens of a sequence."""
        if ragged.attention_mask is not None:
            raise ValueError(
                "attention_mask must be None for a part of a sequence, got one. Pack documents "
                "instead of padding them."
            )
        # Imported here: not every build of PyTorch has torch.distributed.
        from corecontext.distributed.context_parallel import context_parallel_attention

        return context_parallel_attention(inputs, self.shard, spec, self.config.backend)

    def _close_cache(self) -> None:
        """Make the cache read-only: it cannot hold several documents in one row."""
        if self.hybrid:
            raise ValueError(
                "use_cache must be False for packed documents in a model with sliding-window "
                "layers, got True: transformers lets these layers see across documents then. Pass "
                "use_cache=False."
            )
        self.compact.close("documents packed in one row")


def append(
    compact: Any,
    tensors: tuple[Tensor, ...],
    attention_mask: Tensor | None,
    draft: int,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    """Append to a cache and attend. A draft may have to be appended by itself, behind the other
    tokens: then it can be taken back, and is not read as a prompt.

    Args:
        compact: A compact layer, or an object with its `attend`.
        tensors: q [B, H, n, D], k and v [B, Hkv, n, D].
        attention_mask: [B, L] with 0 for padding, of all tokens so far; None without padding.
        draft: As DRAFT.
        scale: Factor of the scores; None is 1 / sqrt(D).
        softcap: Scores become softcap * tanh(score / softcap); None leaves them.

    Returns:
        [B, H, n, D].
    """
    options = {"scale": scale, "softcap": softcap}
    options_of_draft = options
    new = tensors[0].shape[2]
    # Tokens to append before the draft; 0 appends all at once.
    length = 0
    # Full attention and a server's rows, whose config is None, take nothing back.
    if draft and compact.config is not None:
        if draft < new:
            length = _length_before_draft(compact, new, draft)
        if reads_prompts_apart(compact.config):
            # mutant prefill: a draft is read as a prompt
            options_of_draft = {**options, "is_prompt": False}
    if not length:
        return compact.attend(*tensors, attention_mask=attention_mask, **options_of_draft)

    mask_before = None
    if attention_mask is not None:
        mask_before = attention_mask[:, : attention_mask.shape[1] - new + length]
    beginning = (x[:, :, :length] for x in tensors)
    rest = (x[:, :, length:] for x in tensors)
    before = compact.attend(*beginning, attention_mask=mask_before, **options)
    after = compact.attend(*rest, attention_mask=attention_mask, **options_of_draft)
    return torch.cat((before, after), 2)


def _length_before_draft(compact: Any, new: int, draft: int) -> int:
    """Return how many of the new tokens are appended before a draft; 0 appends all at once."""
    if reads_prompts_apart(compact.config):
        # The tokens before the draft are read as a prompt; a single one behind others is a step,
        # which goes with the draft.
        length = new - draft
        return length if length > 1 or compact.is_empty else 0
    # A growing cache can undo its last append, but no first or long one: there the tokens before
    # the draft go first. A cache of fixed length (`max_length`) takes back `rollback` tokens only.
    needs_split = compact.max_length is None and (compact.is_empty or new > UNDO_LIMIT)
    # Gradients reach a first append only; with `num_groups`, which sets g by the length of the
    # first append, a filled cache takes single tokens only.
    can_split = not torch.is_grad_enabled() and compact.config.num_groups is None
    if not needs_split or not can_split:
        return 0
    # A draft of one token would be a step, which cannot be undone: the token before goes with it,
    # but for the first of an empty cache.
    return max(new - draft - 1, int(compact.is_empty))
