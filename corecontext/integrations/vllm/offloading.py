"""Offload pages by vLLM's connector for that, each when it is complete: the index of its last
groups comes later than their tokens. Needs vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from corecontext.config import CCAConfig
from corecontext.integrations.vllm.engine_options import CONNECTOR, num_drafts
from corecontext.integrations.vllm.model_settings import settings_of
from corecontext.ops.fetch.index import index_of
from corecontext.visibility import num_sinks


class CoreContextConnector(OffloadingConnector):
    """Offload as vLLM does, and bring back: pages of all tokens and of core tokens."""

    def __init__(self, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        if self.connector_scheduler is not None:
            name = "_calc_num_offloadable_tokens"
            inner = getattr(self.connector_scheduler, name, None)
            if inner is None:
                raise ValueError(
                    "vLLM must count the tokens that it may offload as releases 0.32 and 0.33 do, "
                    "for core context. Leave out --kv-transfer-config, or take one of these."
                )
            config = settings_of(vllm_config.model_config.hf_text_config)
            given = (inner, config, num_drafts(vllm_config))
            setattr(self.connector_scheduler, name, partial(_offloadable, *given))


def _offloadable(
    inner: Callable[[Any, int], int], config: CCAConfig, drafts: int, request: Any, computed: int
) -> int:
    """Return how many tokens of a request vLLM may offload when so many are computed, of which it
    may reject the last ones."""
    return inner(request, complete_tokens(config, computed - drafts))


def complete_tokens(config: CCAConfig, computed: int) -> int:
    """Return how many of the first tokens have an index for each of their groups when so many are
    computed."""
    sizes = (config.group_size, config.window_size)
    index = index_of(config.fetch_index)
    # The centre is in the first page.
    if computed < num_sinks(config.sink_size, config.group_size) + index.num_centred(*sizes):
        return 0
    return computed - index.lag(*sizes)


def register_connector() -> None:
    """Register the connector with vLLM; more than once has no further effect."""
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, __name__, CoreContextConnector.__name__)
