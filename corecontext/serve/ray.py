"""Deploy the server on Ray Serve: replicas on several machines, added and removed by load.

    serve run corecontext.serve.ray:app model=DIR max_replicas=4

Ray routes requests, keeps replicas alive and replaces dead ones; a replica does the work of
`corecontext serve`. When Ray removes a replica, its running requests come to their end first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from corecontext.files import UserError
from corecontext.serve.build import make_app
from corecontext.serve.settings import Serving

DRAIN_S = 600.0
"""Time for a replica that is removed to finish its running requests."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """Size of the deployment."""

    min_replicas: int = 1
    max_replicas: int = 2
    target_requests: int = 16
    """Running requests a replica at which Ray adds another."""
    num_cpus: float = 1.0
    """CPUs of a replica."""
    num_gpus: float = 0.0
    """GPUs of a replica."""


def app(arguments: dict[str, Any]) -> Any:
    """Make a Ray Serve application, as `serve run` and config files build it.

    Args:
        arguments: Fields of `Serving` (host and port are Ray's) and of `Scale`. Strings are
            converted where a number is meant.

    Raises:
        UserError: an argument is unknown or breaks a rule, or Ray is missing.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise UserError(
            f"the Ray deployment needs {error.name}, which is not installed. Install it with: "
            "pip install 'corecontext[ray]'"
        ) from None
    serving, scale = _settings(arguments)

    @serve.deployment(
        name="corecontext",
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus},
        max_ongoing_requests=serving.max_running + serving.queue_limit,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=DRAIN_S,
        autoscaling_config={
            "min_replicas": scale.min_replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": scale.target_requests,
        },
    )
    @serve.ingress()
    class Replica:
        """A server; its model is loaded on the machine that Ray has chosen."""

        def __init__(self) -> None:
            from corecontext.serve.logs import start_logging

            start_logging()
            self.asgi = make_app(serving)

        def __serve_build_asgi_app__(self) -> Any:
            return self.asgi

        def check_health(self) -> None:
            """Raise where Ray must replace this replica."""
            if not self.asgi.state.worker.alive:
                raise RuntimeError("the model's thread has ended")

    return Replica.bind()  # type: ignore[attr-defined]


def _settings(arguments: dict[str, Any]) -> tuple[Serving, Scale]:
    """Split the arguments, each converted to its field's type."""
    fields = {field.name: field for field in dataclasses.fields(Serving)}
    del fields["host"], fields["port"]
    scales = {field.name: field for field in dataclasses.fields(Scale)}
    serving = {}
    scale = {}
    for name, value in arguments.items():
        if name in scales:
            scale[name] = _converted(scales[name], value)
        elif name in fields:
            serving[name] = _converted(fields[name], value)
        else:
            raise UserError(f"unknown argument {name!r}. Known: {', '.join((*fields, *scales))}.")
    return Serving(**serving), Scale(**scale)


def _converted(field: dataclasses.Field, value: Any) -> Any:
    """Convert a value to the field's type; Ray's command line gives strings."""
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool" and isinstance(value, str):
        return value.lower() in ("true", "1", "yes")
    if kind not in ("int", "float"):
        return value
    try:
        return int(value) if kind == "int" else float(value)
    except (TypeError, ValueError):
        raise UserError(f"{field.name} must be a number, got {value!r}.") from None
