"""Check models and requests, and choose the settings of requests that leave the queue."""

from dataclasses import dataclass
from typing import Any

from corecontext.cache.entries import check_fetch
from corecontext.config import CCAConfig
from corecontext.inference.limits import rounded_up
from corecontext.inference.policy import Load, Policy, settings_for
from corecontext.integrations.hf.enabling import Handle, handle_of
from corecontext.serve.errors import Code, InvalidRequest
from corecontext.serve.memory import CacheMemory
from corecontext.serve.request import Request

SLIDING = (
    "model must have full attention in all layers to be served, got sliding-window layers, whose "
    "caches have no rows that come and go. Use `corecontext generate`, corecontext.inference."
    "Engine, or another model."
)


def servable_handle(model: Any, full: bool) -> Handle:
    """Return the CCA handle of a model that can be served.

    Args:
        full: Whether full attention is served.

    Raises:
        ValueError: CCA is not enabled.
        NotImplementedError: the model has sliding-window layers, was enabled with rollback (tokens
            that its caches can always take back), or fetches raw tokens that are stored nowhere.
    """
    handle = handle_of(model)
    if handle is None:
        raise ValueError(
            "model must have CCA enabled, got one without. Call corecontext.enable(model)."
        )
    if handle.hybrid:
        raise NotImplementedError(SLIDING)
    if not full:
        check_fetch(handle.config)
    if handle.rollback and not full:
        raise NotImplementedError(
            f"rollback must be 0 in a model that is served, got {handle.rollback}: its rows take "
            "nothing back. Enable it without."
        )
    return handle


def _at_most(size: int | None, most: int) -> int | None:
    """Cut a request's own g or s, if any, to `most` tokens."""
    return None if size is None else min(size, most)


@dataclass(frozen=True)
class Admission:
    """The rules of a server for its requests."""

    max_length: int
    """Most tokens of prompt and answer."""
    memory: CacheMemory
    """Refuses requests that its budget could never hold."""
    config: CCAConfig
    """The model's own settings; those of its handle change while a prompt is read under others."""
    full: bool
    """Whether full attention is served."""
    policy: Policy | None
    """Chooses (g, s) or (g, s, k) for requests that do not; None leaves the model's own."""

    def check(self, request: Request) -> None:
        """Refuse a request that could never run.

        Raises:
            InvalidRequest: it is empty, too long, or would not fit the whole budget.
            ValueError: its sizes break a rule.
        """
        lengths = f"got {len(request.prompt)} and {request.max_new_tokens}."
        way_out = "Shorten the prompt or ask for fewer new tokens."
        if not request.prompt or request.max_new_tokens < 0:
            raise InvalidRequest(
                Code.INVALID,
                f"the prompt must have at least one token and the answer none or more, {lengths}",
            )
        if request.length > self.max_length:
            message = f"prompt and answer must fit {self.max_length} tokens, {lengths} {way_out}"
            raise InvalidRequest(Code.TOO_LONG, message)
        # Without the policy, whose choice depends on the load when the request leaves the queue.
        if not self.memory.fits(self.settings_for(request, None), request.length):
            raise InvalidRequest(
                Code.TOO_LONG,
                f"prompt and answer must fit the cache, got {request.length} tokens for a budget "
                f"of {self.memory.budgets}. {way_out}",
            )

    def settings_for(self, request: Request, load: Load | None) -> CCAConfig | None:
        """Choose the settings of a request.

        Args:
            load: For the policy; None ignores the policy.

        Returns:
            CCA's settings; None under full attention.

        Raises:
            ValueError: a size of the request, or of the policy, breaks a rule.
        """
        if self.full:
            if request.chooses_sizes:
                raise ValueError(
                    "group_size, window_size and fetch_groups must be left out, got a server of "
                    "full attention."
                )
            return None
        config = self.config
        # Sizes beyond a request's tokens change no number, but take larger buffers.
        room = rounded_up(request.length)
        group_size = _at_most(request.group_size, max(room, config.group_size))
        window_size = _at_most(request.window_size, max(room, config.window_size))
        if config.varies and request.group_size is not None:
            raise ValueError(
                f"group_size must be left out, got {request.group_size} for a model with a g for "
                f"each layer or head, {config.layer_group_sizes or config.head_group_sizes}."
            )
        return settings_for(
            config,
            group_size,
            window_size,
            len(request.prompt),
            None if load is None else self.policy,
            load or Load(),
            request.fetch_groups,
        )
