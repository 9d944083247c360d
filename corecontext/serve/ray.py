"""The same application as a Ray Serve deployment: replicas on several machines, added and removed
by load.

    serve run corecontext.serve.ray:app model=DIR max_replicas=4

Ray routes requests, keeps replicas alive and replaces those that die; what a replica does is what
`corecontext serve` does. Of a replica that is removed, running requests come to their end first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from corecontext.files import UserError
from corecontext.serve.build import Serving, make_app

DRAIN_S = 600.0  # how long a replica that is to go may finish what it runs


def app(arguments: dict[str, Any]) -> Any:
    """A Ray Serve application, as `serve run` and config files build it.

    Args:
        arguments: Fields of `Serving` (model, cache_mib, policy, ...; host and port are Ray's), and
            min_replicas, max_replicas, target_requests (running requests a replica at which another
            one is added), num_cpus and num_gpus of a replica. Strings are taken for numbers where a
            number is meant.

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
    scale: dict[str, Any] = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_requests": 16,
        "num_cpus": 1.0,
        "num_gpus": 0.0,
    }
    fields = {
        field.name: field
        for field in dataclasses.fields(Serving)
        if field.name not in ("host", "port")
    }
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in scale:
            scale[name] = _number(name, value, type(scale[name]))
        elif name in fields:
            given[name] = _as_field(fields[name], value)
        else:
            raise UserError(f"unknown argument {name!r}. Known: {', '.join((*fields, *scale))}.")
    serving = Serving(**given)

    @serve.deployment(
        name="corecontext",
        ray_actor_options={"num_cpus": scale["num_cpus"], "num_gpus": scale["num_gpus"]},
        max_ongoing_requests=serving.max_running + serving.queue_limit,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=DRAIN_S,
        autoscaling_config={
            "min_replicas": scale["min_replicas"],
            "max_replicas": scale["max_replicas"],
            "target_ongoing_requests": scale["target_requests"],
        },
    )
    @serve.ingress()
    class Replica:
        """One server; its model is loaded where Ray has put it."""

        def __init__(self) -> None:
            from corecontext.serve.logs import start_logging

            start_logging()
            self.asgi = make_app(serving)

        def __serve_build_asgi_app__(self) -> Any:
            return self.asgi

        def check_health(self) -> None:
            """Asked by Ray, which replaces a replica that raises."""
            if not self.asgi.state.worker.alive:
                raise RuntimeError("the model's thread has ended")

    return Replica.bind()  # type: ignore[attr-defined]


def _as_field(field: dataclasses.Field, value: Any) -> Any:
    """A value as the field's type; the command line of Ray gives strings."""
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool" and isinstance(value, str):
        return value.lower() in ("true", "1", "yes")
    return (
        _number(field.name, value, {"int": int, "float": float}[kind])
        if kind in ("int", "float")
        else value
    )


def _number(name: str, value: Any, kind: type) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be a number, got {value!r}.") from None
