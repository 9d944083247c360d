"""Hold and check the settings of `corecontext serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corecontext.files import UserError

BUNDLED = Path(__file__).resolve().parents[1] / "assets" / "demo_model"


@dataclass(frozen=True)
class Serving:
    """Settings of a server; docs/serving.md explains each.

    Raises:
        UserError: a setting breaks a rule.
    """

    model: str | None = None
    """Folder or identifier; None is the bundled model."""
    name: str | None = None
    """The model's name for clients; None is the last part of `model`."""
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
        alone = self.device != "auto" or self.random_weights
        if self.tensor_parallel < 1 or (self.tensor_parallel > 1 and alone):
            raise UserError(
                "tensor-parallel must be at least 1, and 1 with --device or --random-weights, got "
                f"{self.tensor_parallel}."
            )
        if self.queue_limit < 0:
            raise UserError(f"queue-limit must be at least 0, got {self.queue_limit}.")
        key = self.api_key
        if key is not None and (not key or not key.isascii() or " " in key):
            raise UserError("the API key must be ASCII without spaces, and not empty.")
        if self.method == "full" and (self.group_size or self.window_size or self.sinks):
            raise UserError(
                "group-size, window-size and sinks must be left out with --method full."
            )

    @property
    def source(self) -> str:
        """Folder or identifier to load the model from."""
        return self.model or str(BUNDLED)

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        if self.name:
            return self.name
        if self.model is None:
            return "corecontext-demo"
        return Path(self.model).name or self.model
