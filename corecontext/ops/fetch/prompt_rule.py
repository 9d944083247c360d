"""Decide how the tokens of a prompt, or of a decoding step, see a cache under fetch: exactly (all
raw tokens), by a choice that neighbours share, or each by its own choice. Calls without a cache
follow crossover.py."""

from typing import NamedTuple

from corecontext.config import CCAConfig
from corecontext.ops.spec import Spec

PROMPT_LENGTHS = {"cpu": 16384, "cuda": 8192}
"""Tokens of a prompt, by kind of device, that full attention reads in less time than fetch. In the
shape of Llama-3.1-8B on an H100 a prompt takes the same time for 4,096 and 8,192, more for 16,384;
on a CPU fetch was slower at all lengths tried."""
STEP_LENGTHS = {"cpu": 32768, "cuda": 20480}
"""Raw tokens that a decoding step reads in less time than it chooses among them, by kind of device,
if they are on it. On a GPU this holds for caches that grow, whose steps wait for the host; a step
that is captured always chooses: its kernels pool each group as it completes, which a step that
reads all tokens would put off (cache/late.py)."""
SHARED_GROUPS = 2
"""A choice that neighbours share has this many times k groups: together they need more than one."""
WHOLE_TOKENS = {"cpu": 16384, "cuda": 20480}
"""Tokens of all rows, answers included, that a request of known length keeps on the device, by kind
of device: full attention reads and decodes them in less time than fetch. In the shape of
Llama-3.1-8B they take 2.5 GiB, little more than the compact cache of 131,072 tokens with slots."""
NO_END = 2**62  # a position behind all tokens


class Reading(NamedTuple):
    """Describe how the tokens of an append see the past."""

    full_until: int
    """Tokens before this position see all tokens before them."""
    share: int
    """Of the tokens from there on, which see what the settings say, this many neighbours share a
    choice."""
    times: int = 1
    """Their choice has this many times k groups."""

    def settings(self, spec: Spec) -> Spec:
        """Return the settings of the tokens from full_until on."""
        # mutant fetch: a prompt's neighbours choose each by itself
        return spec.replace(fetch_share=self.share, fetch_groups=self.times * spec.fetch_groups)


EACH_BY_ITSELF = Reading(full_until=0, share=1)


def reading_of(config: CCAConfig, device: str, is_prompt: bool) -> Reading:
    """Return how tokens are read into a cache: a prompt in the fastest way that loses nothing,
    other tokens, which are decoded or scored, each by its own choice.

    How a token is read depends on its position only: not on the chunks of the prompt, nor on the
    tokens after it.

    Args:
        device: A kind of device, "cpu" or "cuda".
    """
    if not is_prompt or config.prefill == "fetch":
        return EACH_BY_ITSELF
    if config.prefill == "full":
        return Reading(NO_END, share=1)
    if not config.fetch_groups:
        return EACH_BY_ITSELF
    times = SHARED_GROUPS if config.fetch_share > 1 else 1
    return Reading(PROMPT_LENGTHS.get(device, 0), config.fetch_share, times)


def reads_prompts_apart(config: CCAConfig) -> bool:
    """Whether prompts are read in another way than other tokens, on any device."""
    return reading_of(config, "cpu", is_prompt=True) != EACH_BY_ITSELF


def most_whole(config: CCAConfig, device: str) -> int:
    """Return how many tokens, those of an answer and of all rows counted, stay on the device: a
    request of so many runs under full attention from its first token to its last, and a growing
    cache moves to host memory behind them. Settings that ask for a choice of each token, for 8 bits
    or for sizes by layer or head have what they ask for: 0."""
    if not config.fetch_groups or config.prefill == "fetch" or config.cache_dtype != "auto":
        return 0
    return 0 if config.varies else WHOLE_TOKENS.get(device, 0)


def most_read(config: CCAConfig, device: str) -> int:
    """Return the length of the longest row up to which a decoding step attends to all raw tokens,
    which are on its device, instead of choosing among them; 0 where settings ask for a choice of
    each token, or for 8 bits."""
    if not config.fetch_groups or config.prefill == "fetch" or config.cache_dtype != "auto":
        return 0
    return STEP_LENGTHS.get(device, 0)
