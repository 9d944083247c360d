"""Start a server: load the model, open the port, and on SIGTERM let what runs come to its end."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from corecontext.files import UserError
from corecontext.loading import (
    Loaded,
    cca_config,
    check_architecture,
    check_dtype,
    load,
    load_config,
    one_line,
    pick_device,
)
from corecontext.serve.tensor_parallel import follow, join, leads

BUNDLED = Path(__file__).resolve().parents[1] / "assets" / "demo_model"
CPU_SHARE, GPU_SHARE = 0.25, 0.8  # of the free memory, for caches


@dataclass(frozen=True)
class Serving:
    """What `corecontext serve` is given; docs/serving.md says what each is for."""

    model: str | None = None
    """Folder or identifier; None is the bundled model."""
    name: str | None = None
    """What clients call it; None is the last part of `model`."""
    method: str = "cca"
    """"cca", or "full" for full attention from a static cache."""
    group_size: int | None = None
    window_size: int | None = None
    policy: str = "elastic"
    """"elastic", "fixed", or module:function."""
    first_token_limit: float = 2.5
    """Seconds to the first token at which the elastic policy compresses most."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    cache_mib: int | None = None
    max_running: int = 64
    rows_per_pool: int | None = None
    queue_limit: int = 256
    chunk_size: int | None = None
    max_length: int | None = None
    time_limit_s: float = 600.0
    dtype: str = "auto"
    device: str = "auto"
    random_weights: bool = False
    """Make weights up instead of loading them: `model` needs only its config.json. For
    benchmarks."""
    sinks: int | None = None
    """First tokens of every request that stay uncompressed."""
    tensor_parallel: int = 1
    """Processes of this machine that the model is split over."""

    def __post_init__(self) -> None:
        if self.method not in ("cca", "full"):
            raise UserError(f"method must be cca or full, got {self.method!r}.")
        if not 0 <= self.port < 2**16:
            raise UserError(f"port must be 0 to {2**16 - 1}, got {self.port}.")
        for name, value in (
            ("time-limit", self.time_limit_s),
            ("first-token-limit", self.first_token_limit),
        ):
            if not 0 < value < float("inf"):
                raise UserError(f"{name} must be more than 0 seconds, got {value}.")
        for name in ("cache_mib", "max_running", "rows_per_pool", "chunk_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name.replace('_', '-')} must be at least 1, got {value}.")
        if self.tensor_parallel < 1 or (
            self.tensor_parallel > 1 and (self.device != "auto" or self.random_weights)
        ):
            raise UserError(
                "tensor-parallel must be at least 1, and 1 with --device or --random-weights, got "
                f"{self.tensor_parallel}."
            )
        if self.queue_limit < 0:
            raise UserError(f"queue-limit must be at least 0, got {self.queue_limit}.")
        if self.api_key is not None and (
            not self.api_key or not self.api_key.isascii() or " " in self.api_key
        ):
            raise UserError("the API key must be ASCII without spaces, and not empty.")
        if self.method == "full" and (self.group_size or self.window_size or self.sinks):
            raise UserError(
                "group-size, window-size and sinks must be left out with --method full."
            )

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.name or (
            "corecontext-demo" if self.model is None else Path(self.model).name or self.model
        )


def make_app(serving: Serving) -> Any:
    """Load the model and make the application.

    Raises:
        UserError: the model cannot be loaded or served, or a setting breaks a rule.
    """
    try:
        from corecontext.serve.http import Options, create_app
    except ImportError as error:
        raise UserError(
            f"serve needs {error.name}, which is not installed. Install it with: "
            "pip install 'corecontext[serve]'"
        ) from None
    from corecontext.inference.policy import TablePolicy

    scheduler, tokenizer = make_scheduler(serving)
    if scheduler.model.device.type == "cuda":
        scheduler.warm_up(
            scheduler.policy.sizes if isinstance(scheduler.policy, TablePolicy) else ()
        )
    return create_app(
        scheduler, tokenizer, Options(serving.model_name, serving.api_key, serving.time_limit_s)
    )


def make_scheduler(serving: Serving) -> tuple[Any, Any]:
    """Load the model, or this process's part of it: its scheduler and its tokenizer.

    Raises:
        UserError: as `make_app`.
    """
    import torch

    from corecontext.inference.policy import load_policy, table_around
    from corecontext.serve.follower import Follower
    from corecontext.serve.rows import RowShape
    from corecontext.serve.scheduler import Scheduler

    policy = None
    with one_line():
        if serving.policy not in ("elastic", "fixed"):
            policy = load_policy(serving.policy)
        if (
            serving.tensor_parallel > 1
        ):  # asked before any process starts, and before transformers asks in other words
            RowShape.of(
                load_config(serving.model or str(BUNDLED)), torch.float32, serving.tensor_parallel
            )
    together = join(serving)
    loaded = (
        _random(serving)
        if serving.random_weights
        else load(
            serving.model or str(BUNDLED),
            group_size=serving.group_size,
            window_size=serving.window_size,
            sinks=serving.sinks,
            dtype=serving.dtype,
            device=serving.device,
            tensor_parallel=together is not None,
        )
    )
    config = loaded.config
    assert config is not None, (
        "a server's model has CCA enabled, whose place its own caches take under method 'full'"
    )
    if serving.policy == "elastic":
        policy = table_around(
            config.group_size, config.window_size, first_token_limit=serving.first_token_limit
        )
    cuda = loaded.model.device.type == "cuda"
    with one_line():
        kind = Scheduler if together is None or together.leads else Follower
        scheduler = kind(
            loaded.model,
            full=serving.method == "full",
            policy=policy,
            cache_bytes=_cache_bytes(serving, loaded.model.device),
            max_rows=serving.max_running,
            rows_per_pool=serving.rows_per_pool or (16 if cuda else 8),
            queue_limit=serving.queue_limit,
            chunk_size=serving.chunk_size,
            max_length=serving.max_length,
            together=together,
        )
    return scheduler, loaded.tokenizer


def _random(serving: Serving) -> Loaded:
    """A model of the config's sizes with random weights, made on the device, and a tokenizer of
    made-up words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from corecontext.integrations.transformers import full_attention
    from corecontext.loading import enable_cca

    hf_config = load_config(serving.model or str(BUNDLED))
    check_architecture(hf_config)
    check_dtype(serving.dtype)
    device = pick_device(serving.device)
    dtype = (
        serving.dtype if serving.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    )
    with (
        one_line("random weights cannot be made"),
        torch.device(device),
        torch.random.fork_rng([] if device == "cpu" else [torch.device(device)]),
    ):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=getattr(torch, dtype), attn_implementation=full_attention(hf_config)
        )
    config = cca_config(hf_config, serving.group_size, serving.window_size, sinks=serving.sinks)
    enable_cca(model.eval(), config)
    count = hf_config.get_text_config(decoder=True).vocab_size
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return Loaded(model, PreTrainedTokenizerFast(tokenizer_object=words), config)


def _cache_bytes(serving: Serving, device: Any) -> int:
    """The budget: what is given, else a share of the memory that is free now."""
    from corecontext.inference.limits import free_bytes

    if serving.cache_mib is not None:
        return serving.cache_mib * 2**20
    free = free_bytes(device)
    if free is not None:
        return int(GPU_SHARE * free)
    try:
        return int(CPU_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):  # not every system says
        return 2**30


def run(serving: Serving) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code.

    After the first signal new requests get 503 and those that were taken come to their end; a
    second one ends all.

    Raises:
        UserError: as `make_app`, or the port is taken.
    """
    if serving.tensor_parallel > 1 and not leads():
        return follow(serving)
    app = make_app(serving)
    import uvicorn

    from corecontext.serve.logs import log_event, start_logging

    listener = socket.socket(socket.AF_INET6 if ":" in serving.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((serving.host, serving.port))
        listener.listen(2048)  # before it is said; who comes before the server is up waits
    except OSError as error:
        raise UserError(
            f"cannot listen on {serving.host} port {serving.port}: {error.strerror}. Choose another with "
            "--port."
        ) from None

    class Server(uvicorn.Server):
        """Goes on serving after a signal until what runs has ended."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            worker = app.state.worker
            if worker.draining:
                self.should_exit = self.force_exit = True
            worker.draining = True

        async def on_tick(self, counter: int) -> bool:
            if app.state.worker.draining and app.state.worker.idle:
                self.should_exit = True
            return await super().on_tick(counter)

    start_logging()
    host, port = listener.getsockname()[:2]
    log_event(
        "listening",
        host=host,
        port=port,
        model=serving.model_name,
        method=serving.method,
        policy=serving.policy,
        key=serving.api_key is not None,
    )
    if serving.api_key is None and host not in ("127.0.0.1", "::1"):
        log_event(
            "open to the network without an API key: set CORECONTEXT_API_KEY", level="warning"
        )
    Server(
        uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=30)
    ).run([listener])
    return int(app.state.worker.failed)
