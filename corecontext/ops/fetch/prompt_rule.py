"""Decide how a prompt, or a step, with a cache sees the past under fetch: exactly (all of it), by a
choice that neighbours share, or each by its own choice. Calls without a cache follow crossover.py.
"""

from typing import NamedTuple

from corecontext.config import CCAConfig
from corecontext.ops.spec import Spec

PROMPT_LENGTHS = {"cpu": 16384, "cuda": 8192}
"""Tokens of a prompt, by kind of device, that full attention reads in less time than fetch. In the
shape of Llama-3.1-8B on an H100 a prompt takes the same time for 4,096 and 8,192, more for 16,384;
on a CPU fetch was slower at all lengths tried."""
STEP_LENGTHS = {"cpu": 32768, "cuda": 0}
"""Tokens that a decoding step reads in less time than it chooses among them, by kind of device,
where they are on it. On a GPU no step of its own pools late, so that it always chooses."""
SHARED_GROUPS = 2
"""Times k groups of a choice that neighbours share: what several queries need is more than one."""
WHOLE_TOKENS = {"cpu": 16384, "cuda": 20480}
"""Tokens of all rows, answers included, that a request of known length keeps on the device, by kind
of device: full attention reads and decodes them in less time than fetch. In the shape of
Llama-3.1-8B they take 2.5 GiB, little more than the compact cache of 131,072 tokens with slots."""
NO_END = 2**62


class Reading(NamedTuple):
    """Describe how the tokens of an append see the past."""

    full_until: int
    """Tokens before this position see all tokens before them."""
    share: int
    """Later ones see what the settings say; with fetch so many neighbours share a choice."""
    times: int = 1
    """Times k groups of their choice."""

    def settings(self, spec: Spec) -> Spec:
        """Return the settings of the later tokens."""
        # mutant fetch: a prompt's neighbours choose each by itself
        return spec.replace(fetch_share=self.share, fetch_groups=self.times * spec.fetch_groups)


EACH_BY_ITSELF = Reading(0, 1)


def reading_of(config: CCAConfig, device: str, is_prompt: bool) -> Reading:
    """Return how tokens are read into a cache: a prompt in the fastest way that loses nothing,
    other tokens, which are decoded or scored, each by its own choice.

    The way of a token depends on its position only: not on the chunks of the prompt, nor on what
    follows.

    Args:
        device: A kind of device, "cpu" or "cuda".
    """
    if not is_prompt or config.prefill == "fetch":
        return EACH_BY_ITSELF
    if config.prefill == "full":
        return Reading(NO_END, 1)
    if not config.fetch_groups:
        return EACH_BY_ITSELF
    times = SHARED_GROUPS if config.fetch_share > 1 else 1
    return Reading(PROMPT_LENGTHS.get(device, 0), config.fetch_share, times)


def reads_prompts_apart(config: CCAConfig) -> bool:
    """Whether prompts are read in another way than other tokens."""
    return reading_of(config, "cpu", True) != EACH_BY_ITSELF


def keeps_whole(config: CCAConfig, device: str, tokens: int) -> bool:
    """Whether a request of so many tokens, those of its answer and of all rows counted, runs under
    full attention from its first token to its last."""
    if not config.fetch_groups or config.prefill == "fetch" or config.cache_dtype != "auto":
        return False
    return not config.varies and tokens <= WHOLE_TOKENS.get(device, 0)


def step_reads_all(config: CCAConfig, device: str, length: int) -> bool:
    """Whether a decoding step attends to all raw tokens, which are on its device, instead of
    choosing among them.

    Args:
        length: Tokens of the longest row.
    """
    if config.prefill == "fetch" or config.cache_dtype != "auto":
        return False
    return config.fetch_groups > 0 and length <= STEP_LENGTHS.get(device, 0)
