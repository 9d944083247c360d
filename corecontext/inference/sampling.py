"""Choose the next token from logits, on the device and without a host sync, so that it can be
captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

INVALID = -1
"""Chosen in place of a token number where a row's largest logit is not finite."""
COLDEST = 1e-5
"""Below this temperature the likeliest token is taken: dividing by less overflows float32."""
HOTTEST = 1e30
"""The largest temperature."""


class InvalidLogits(ValueError):
    """The error of logits from which no token can be chosen."""

    def __init__(self) -> None:
        super().__init__(
            "the model's largest logit must be a finite number, got NaN or infinity. Check its "
            "weights, or load it with another dtype, such as float32."
        )


@dataclass(frozen=True)
class Sampling:
    """Rule for choosing the next token. The default takes the likeliest."""

    temperature: float = 0.0
    """0, or less than 1e-5, takes the likeliest token; otherwise logits are divided by it."""
    top_k: int | None = None
    """Sample among this many likeliest tokens; None among all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens that together have at least this probability."""

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", self.top_p)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {value!r}.")
        if not 0 <= self.temperature <= HOTTEST:
            most = f" and at most {HOTTEST:g}" if self.temperature > 0 else ""
            raise ValueError(
                f"temperature must be at least 0{most}, got {self.temperature}. Use 0 for the "
                "likeliest token."
            )
        got = f"got {self.top_k!r}. Use None for all tokens."
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int | None):
            raise TypeError(f"top_k must be an integer, {got}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, {got}")
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be more than 0 and at most 1, got {self.top_p}. Use 1.0 for all "
                "tokens."
            )

    @property
    def kind(self) -> str:
        """The computation, for each of which a step is captured: "greedy", "plain", or "filtered"
        (a sort for top-k and top-p)."""
        if self.temperature < COLDEST:
            return "greedy"
        if self.top_k is None and self.top_p == 1:
            return "plain"
        return "filtered"

    @classmethod
    def from_generation_config(
        cls, config: Any, *, do_sample: bool | None = None, **settings: float | None
    ) -> Sampling:
        """Return the sampling of `model.generate` under this generation config, with the defaults
        of its unset fields.

        Args:
            do_sample: Overrides the config's.
            settings: temperature, top_k and top_p that override the config's; None leaves them.
        """
        if not (config.do_sample if do_sample is None else do_sample):
            return cls()
        chosen: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
        for name in chosen:
            for value in (getattr(config, name), settings.get(name)):
                if value is not None:
                    chosen[name] = value
        return cls(chosen["temperature"], chosen["top_k"] or None, chosen["top_p"])  # 0: no limit


class Sampler:
    """Sample for one batch, with settings kept in tensors that a captured step reads in place.

    Args:
        device: Device of the logits.
        streams: 1 random stream for all rows together, or one for each row, so that a row's tokens
            do not depend on its neighbours.
    """

    def __init__(self, device: torch.device, streams: int) -> None:
        self.generators = [torch.Generator(device) for _ in range(streams)]
        self.temperature = torch.ones((), device=device)
        self.top_k = torch.ones((), dtype=torch.long, device=device)
        self.top_p = torch.ones((), device=device)

    def start(self, sampling: Sampling, seeds: Sequence[int], vocabulary: int) -> None:
        """Set the settings, and restart the random streams by a seed each, for a new request."""
        if sampling.kind == "greedy":
            return  # nothing is drawn
        self.temperature.fill_(sampling.temperature)
        self.top_k.fill_(min(sampling.top_k or vocabulary, vocabulary))
        self.top_p.fill_(sampling.top_p)
        for generator, seed in zip(self.generators, seeds):
            generator.manual_seed(seed)

    def choose(self, logits: Tensor, kind: str) -> Tensor:
        """Return token numbers [B, 1], int64, from logits [B, vocabulary]; `INVALID` for rows whose
        largest is not finite. `kind` is `Sampling.kind`."""
        largest, tokens = logits.max(-1, keepdim=True)
        if kind != "greedy":
            limits = (self.top_k, self.top_p) if kind == "filtered" else None
            tokens = draw(logits.float() / self.temperature, self.generators, limits)
        return checked(tokens, largest)


def checked(tokens: Tensor, largest: Tensor) -> Tensor:
    """Return tokens [B, 1], `INVALID` where the largest of the row's logits [B, 1] is not finite:
    the host reads that with the tokens, and need not wait for the device once more."""
    # mutant inference: a token is chosen from NaN
    return tokens.where(largest.isfinite(), INVALID)


def draw(
    logits: Tensor, generators: Sequence[torch.Generator], limits: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Draw token numbers [B, 1] by the probabilities of logits [B, vocabulary], float32.

    Args:
        generators: One for all rows, or one for each.
        limits: top_k and top_p, each a tensor with one number, or [B, 1]; None for neither.
    """
    if limits is not None:
        logits = logits.masked_fill(~_kept(logits, *limits), -torch.inf)
    # The largest of p / e, e exponential, is distributed as p. torch.multinomial draws in the same
    # way, but waits for the host.
    noise = torch.empty_like(logits)
    if len(generators) == 1:
        noise.exponential_(generator=generators[0])
    else:
        for row, generator in zip(noise, generators):
            # mutant inference: neighbours share a random stream
            row.exponential_(generator=generator)
    return (logits.softmax(-1) / noise).argmax(-1, keepdim=True)


def _kept(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return a mask [B, vocabulary] of the tokens to draw from: of the top k the fewest likeliest
    that reach top_p together."""
    ordered, order = logits.sort(-1, descending=True)
    last = ordered.gather(-1, (top_k - 1).expand(len(logits), 1))
    ordered = ordered.masked_fill(ordered < last, -torch.inf)
    probabilities = ordered.softmax(-1)
    # Sums over likelier tokens: 0 for the likeliest, which always stays.
    # mutant inference: top-p without the token that crosses it
    before = probabilities.cumsum(-1) - probabilities
    # At least 1e-30, as a smaller top_p may be 0 in float32.
    # mutant inference: top-p keeps a token beyond an exactly reached bound
    kept = (before < top_p.clamp(min=1e-30)) & (ordered >= last)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def choose_rows(
    logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]
) -> Tensor:
    """Choose token numbers [B] from logits [B, vocabulary], each row by its own sampling and random
    stream; `INVALID` for rows whose largest logit is not finite."""
    logits = logits.float()
    largest, tokens = logits.max(-1, keepdim=True)
    rows = [row for row, sampling in enumerate(samplings) if sampling.kind != "greedy"]
    if not rows:
        return checked(tokens, largest)[:, 0]
    vocabulary = logits.shape[-1]
    sampled = [samplings[row] for row in rows]

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    limits = None
    if any(sampling.kind == "filtered" for sampling in sampled):
        # mutant inference: a top-k beyond the vocabulary in a step of several requests
        limits = (
            column([min(s.top_k or vocabulary, vocabulary) for s in sampled], torch.long),
            column([s.top_p for s in sampled], torch.float32),
        )
    index = torch.tensor(rows, device=logits.device)
    scaled = logits[index] / column([s.temperature for s in sampled], torch.float32)
    tokens[index] = draw(scaled, [generators[row] for row in rows], limits)
    return checked(tokens, largest)[:, 0]
