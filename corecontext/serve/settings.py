"""Hold and check the settings of `corecontext serve`: each field is an option."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from corecontext.files import UserError, read_text
from corecontext.methods import CCA_SETTINGS, check_settings

BUNDLED = Path(__file__).resolve().parents[1] / "assets" / "demo_model"
"""The model that is served where none is given."""
SERVED = tuple(name for name in CCA_SETTINGS if name != "cache_dtype")
"""Settings of CCA that a server may be given; `cache_dtype` is the checkpoint's."""


def read_key(path: str | None) -> str | None:
    """Return the API key in a file, else that of the environment, if any. No option holds the key
    itself: other users of the machine can read a command line."""
    # mutant serve: the key of the environment is ignored
    if path is None:
        return os.environ.get("CORECONTEXT_API_KEY") or None
    # mutant serve: the line break of the key's file is a part of the key
    return read_text(path).strip()


@dataclass(frozen=True)
class Serving:
    """Settings of a server; docs/serving.md explains each.

    Raises:
        UserError: a setting breaks a rule.
    """

    model: Annotated[
        str | None,
        typer.Option(
            help="Folder in the Hugging Face format, GGUF file, smollm2, or an identifier on the "
            "hub. Default: the bundled model."
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(help="The model's name for clients. Default: the last part of --model."),
    ] = None
    method: Annotated[
        str, typer.Option(help="cca, or full for full attention from a static cache.")
    ] = "cca"
    policy: Annotated[
        str,
        typer.Option(
            help="g, s and k of requests that choose none: fixed (the model's), elastic (by the "
            "load), or module:function."
        ),
    ] = "fixed"
    first_token_limit: Annotated[
        float, typer.Option(help="Seconds to the first token at which elastic compresses most.")
    ] = 2.5
    # mutant serve: listens on every address
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(help="0 takes a free one, which the first log line names.")
    ] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key-file",
            callback=read_key,
            help="File with the key that clients must send. Default: the variable "
            "CORECONTEXT_API_KEY; none: no key.",
        ),
    ] = field(default=None, repr=False)
    cache_mib: Annotated[
        int | None, typer.Option(help="Budget of all caches, MiB. Default: by the free memory.")
    ] = None
    host_cache_mib: Annotated[
        int | None,
        typer.Option(
            help="Budget of raw tokens in host memory (--store host), MiB. Default: beside "
            "a GPU three quarters of the memory available, which several servers cannot share; "
            "without one half."
        ),
    ] = None
    max_running: Annotated[int, typer.Option(help="Requests that run at once.")] = 64
    rows_per_pool: Annotated[
        int | None,
        typer.Option(help="Slots of cache allocated at once. Default: 8; on a GPU 16."),
    ] = None
    queue_limit: Annotated[int, typer.Option(help="Requests that may wait; more get 429.")] = 256
    client_sizes: Annotated[
        int,
        typer.Option(
            help="Different g, s and k that requests may choose at once: each takes slots of its "
            "own and slows every step. 0 forbids a choice."
        ),
    ] = 8
    chunk_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt read between steps. Default: 256; on a GPU 2048, and twice as "
            "many behind the first four chunks."
        ),
    ] = None
    max_length: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer. Default: the model's.")
    ] = None
    page: Annotated[bool, typer.Option(help="Show a page to ask the model at /.")] = True
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", help="Seconds after which a request is ended.")
    ] = 600.0
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU), float32, bfloat16 or float16.")
    ] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    untested: Annotated[
        bool,
        typer.Option(
            "--untested",
            help="Accept an architecture that no test has, after a check on the model.",
        ),
    ] = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of SERVED that are given, by name."""

    def __post_init__(self) -> None:
        if self.method not in ("cca", "full"):
            raise UserError(f"method must be cca or full, got {self.method!r}.")
        if not 0 <= self.port < 2**16:
            raise UserError(f"port must be 0 to {2**16 - 1}, got {self.port}.")
        for name in ("time_limit_s", "first_token_limit"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                option = name.removesuffix("_s").replace("_", "-")
                raise UserError(f"{option} must be more than 0 seconds, got {value}.")
        positive = ("cache_mib", "host_cache_mib", "max_running", "rows_per_pool", "chunk_size")
        for name in (*positive, "max_length", "queue_limit", "client_sizes"):
            value = getattr(self, name)
            least = 0 if name in ("queue_limit", "client_sizes") else 1
            if value is not None and value < least:
                raise UserError(f"{name.replace('_', '-')} must be at least {least}, got {value}.")
        key = self.api_key
        if key is not None and (not key or not key.isascii() or " " in key):
            raise UserError("the API key must be ASCII without spaces, and not empty.")
        check_settings(self.method, self.settings)

    @property
    def source(self) -> str:
        """Folder or identifier to load the model from."""
        return self.model or str(BUNDLED)

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        if self.model is None:
            return self.name or "corecontext-demo"
        return self.name or Path(self.model).name or self.model
