"""Make logits of last hidden states as a Hugging Face model does: its head, scale and softcap."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

DIVIDED = ("granite", "granitemoe")
"""Architectures that divide their logits by `logits_scaling`."""
_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
"""Fields of a config by which architectures scale logits; only DIVIDED divide by them."""


class LogitRule(NamedTuple):
    """How a model makes its logits of x, the products of last hidden states and its head: softcap *
    tanh(x / divisor / softcap), or x / divisor without a softcap."""

    divisor: float
    softcap: float | None

    @classmethod
    def of(cls, hf_config: Any) -> LogitRule:
        """Read the rule from a Hugging Face config.

        Raises:
            NotImplementedError: the architecture scales its logits by a rule that is not known.
        """
        if not has_known_logits(hf_config):
            raise NotImplementedError(
                f"architecture {hf_config.model_type!r} scales its logits by a rule that is not "
                "known here. Take the logits of the whole model."
            )
        divisor = hf_config.logits_scaling if hf_config.model_type in DIVIDED else 1.0
        return cls(divisor, getattr(hf_config, "final_logit_softcapping", None))

    def divided(self, hidden: Tensor) -> Tensor:
        """Return hidden / divisor, [..., width], whose products with the head are x / divisor: the
        many logits need not be divided. The same tensor where the divisor is 1."""
        return hidden if self.divisor == 1 else hidden / self.divisor


def has_known_logits(hf_config: Any) -> bool:
    """Whether `LogitRule` states how an architecture makes its logits."""
    if hf_config.model_type in DIVIDED:
        return True
    return all(getattr(hf_config, name, None) in (None, 1.0) for name in _SCALES)


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits of last hidden states [..., width], in float32."""
    rule = LogitRule.of(model.config)
    logits = model.get_output_embeddings()(rule.divided(hidden)).float()
    if rule.softcap is None:
        return logits
    return rule.softcap * (logits / rule.softcap).tanh()
