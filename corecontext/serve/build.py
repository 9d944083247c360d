"""Start a server: load the model, open the port, and drain on SIGTERM."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Any

from corecontext.files import UserError, install_command
from corecontext.loading import check_architecture, load, load_config, one_line
from corecontext.serve.settings import Serving

CPU_SHARE = 0.25
"""Share of the available host memory for caches without a GPU."""
FORCED_S = 5.0
"""Seconds for the model's thread to end after a second signal."""


def make_app(serving: Serving) -> Any:
    """Load the model and make the application.

    Raises:
        UserError: the model cannot be loaded or served, or a setting breaks a rule.
    """
    try:
        from corecontext.serve.http import create_app
    except ImportError as error:
        raise UserError(
            f"serve needs {error.name}, which is not installed. Install it with: "
            f"{install_command('serve')}"
        ) from None
    from corecontext.serve.warm_up import warm_up

    scheduler, tokenizer = make_scheduler(serving)
    if scheduler.model.device.type == "cuda":
        warm_up(scheduler, getattr(scheduler.policy, "sizes", ()))
    return create_app(scheduler, tokenizer, serving)


def make_scheduler(serving: Serving) -> tuple[Any, Any]:
    """Load the model; return (its scheduler, its tokenizer).

    Raises:
        UserError: as `make_app`.
    """
    from corecontext.inference.chunk_size import SERVED_CHUNK
    from corecontext.inference.policy import TablePolicy, load_policy, table_rows
    from corecontext.integrations.hf.attention_interface import full_layers
    from corecontext.serve.admission import SLIDING
    from corecontext.serve.scheduler import UNLIMITED, Scheduler

    # Refuse wrong settings before any weight is loaded.
    policy = None
    with one_line():
        if serving.policy not in ("elastic", "fixed"):
            policy = load_policy(serving.policy)
        hf_config = load_config(serving.source)
        check_architecture(hf_config, serving.untested)
        if len(full_layers(hf_config)) < hf_config.num_hidden_layers:
            raise NotImplementedError(SLIDING)

    loaded = load(
        serving.source,
        **serving.settings,
        dtype=serving.dtype,
        device=serving.device,
        untested=serving.untested,
        warn=serving.method == "cca",
    )
    config = loaded.config
    assert config is not None, "a server's model has CCA enabled, even where it serves method full"

    # The elastic policy and the defaults depend on the model and its device.
    if serving.policy == "elastic":
        rows = table_rows(config.group_size, config.window_size, config.fetch_groups)
        policy = TablePolicy(rows, first_token_limit=serving.first_token_limit)
    cuda = loaded.model.device.type == "cuda"
    chunk_size = serving.chunk_size or SERVED_CHUNK["cuda" if cuda else "cpu"]
    with one_line():
        scheduler = Scheduler(
            loaded.model,
            full=serving.method == "full",
            policy=policy,
            cache_bytes=_cache_bytes(serving, loaded.model.device),
            host_bytes=_host_bytes(serving, loaded.model.device),
            max_rows=serving.max_running,
            rows_per_pool=serving.rows_per_pool or (16 if cuda else 8),
            queue_limit=serving.queue_limit,
            client_sizes=serving.client_sizes,
            chunk_size=chunk_size,
            # A GPU takes as long for them as full attention for half as many, and less than the
            # host for two chunks.
            later_chunk_size=2 * chunk_size if cuda else None,
            max_length=serving.max_length or UNLIMITED,
        )
    return scheduler, loaded.tokenizer


def _cache_bytes(serving: Serving, device: Any) -> int:
    """Return the budget of all caches: `cache_mib`, else a share of the memory that is free now."""
    from corecontext.inference.chunk_size import free_bytes
    from corecontext.inference.limits import CACHE_SHARE

    if serving.cache_mib is not None:
        return serving.cache_mib * 2**20
    free = free_bytes(device)
    if free is not None:
        return int(CACHE_SHARE * free)
    return max(1, int(CPU_SHARE * _available_host_bytes(default=2**32)))


def _host_bytes(serving: Serving, device: Any) -> int:
    """Return the budget of raw tokens in host memory: `host_cache_mib`, else a share of the memory
    that is available now."""
    from corecontext.inference.limits import HOST_SHARES

    if serving.host_cache_mib is not None:
        return serving.host_cache_mib * 2**20
    share = HOST_SHARES["cuda" if device.type == "cuda" else "cpu"]
    return max(1, int(share * _available_host_bytes(default=2**31)))


def _available_host_bytes(default: int) -> int:
    """Return the bytes that this process may still take, by the machine and by its control group;
    the default where the system does not say."""
    from corecontext.cache.host_memory import available_bytes

    available = available_bytes()
    return default if available is None else available


def run(serving: Serving) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code, 1 if the model failed.

    After the first signal new requests get 503, and accepted ones run to their end; a second signal
    ends all.

    Raises:
        UserError: as `make_app`, or the port is taken.
    """
    listener = _bind(serving)
    app = make_app(serving)
    import uvicorn

    from corecontext.serve.connection import BACKLOG, Connection
    from corecontext.serve.logs import start_logging

    class Server(uvicorn.Server):
        """Serve on after a signal until all accepted requests have ended."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            worker = app.state.worker
            if worker.draining:  # the second signal
                self.should_exit = True
                self.force_exit = True
            worker.draining = True

        async def on_tick(self, counter: int) -> bool:
            if app.state.worker.draining and app.state.worker.idle:
                self.should_exit = True
            return await super().on_tick(counter)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await super().shutdown(sockets)
            if self.force_exit:
                await asyncio.to_thread(app.state.worker.stop, FORCED_S)

    start_logging()
    with _one_line_of_listening(serving):
        listener.listen(BACKLOG)  # before the log names the port: early clients queue
    _log_listening(serving, app.state.service, *listener.getsockname()[:2])
    options = uvicorn.Config(
        app,
        http=Connection,
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=30,
    )
    Server(options).run([listener])
    worker = app.state.worker
    # mutant serve: the interpreter ends under the model's thread
    if worker.alive:
        # The thread is still in PyTorch, which aborts a process whose interpreter ends meanwhile.
        os._exit(int(worker.failed))
    return int(worker.failed)


def _log_listening(serving: Serving, service: Any, host: str, port: int) -> None:
    """Log a server's address, settings and further tokens that end its answers; warn where any
    machine may use it."""
    from corecontext.serve.guard import is_loopback
    from corecontext.serve.logs import log_event

    scheduler = service.scheduler
    config = scheduler.admission.config
    fixed = (config.group_size, config.window_size, config.fetch_groups)
    log_event(
        "listening",
        host=host,
        port=port,
        model=serving.model_name,
        method=serving.method,
        policy=serving.policy,
        sizes=getattr(scheduler.policy, "sizes", [fixed]),
        settings=None if serving.method == "full" else config.to_dict(),
        key=serving.api_key is not None,
    )
    ends = service.ends
    if ends.added:
        log_event(
            "answers also end with tokens that generation_config.json lacks", tokens=ends.added
        )
    if not ends.tokens:
        log_event("no token ends a text: answers go on to max_tokens")
    # mutant serve: open to the network without a word
    if serving.api_key is None and not is_loopback(host):
        log_event(
            "open to the network without an API key: set CORECONTEXT_API_KEY", level="warning"
        )


def _bind(serving: Serving) -> socket.socket:
    """Take the port, before the model is loaded: a port in use is reported at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in serving.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with _one_line_of_listening(serving):
        listener.bind((serving.host, serving.port))
    return listener


@contextlib.contextmanager
def _one_line_of_listening(serving: Serving) -> Iterator[None]:
    """Turn the refusal of a port into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot listen on {serving.host} port {serving.port}: {error.strerror}. Choose "
            "another with --port."
        ) from None
