"""Deploy the server on Ray Serve: replicas on several machines, added and removed by load.

    serve run corecontext.serve.ray:app model=DIR max_replicas=4

Ray routes requests, keeps replicas alive and replaces dead ones; a replica does the work of
`corecontext serve`. When Ray removes a replica, its running requests come to their end first.
"""

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from corecontext.config import CCAConfig
from corecontext.files import UserError, install_command
from corecontext.methods import PRESET, field_of
from corecontext.serve.build import make_app
from corecontext.serve.settings import SERVED, Serving, read_key

DRAIN_S = 600.0
"""Time for a replica that is removed to finish its running requests."""


@dataclass(frozen=True)
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
        arguments: Fields of `Serving` (host and port are Ray's) and of `Scale`, and CCA's settings.
            Strings are converted where a number is meant. Without `api_key` the key is that of the
            environment.

    Raises:
        UserError: an argument is unknown or breaks a rule, or Ray is missing.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise UserError(
            f"the Ray deployment needs {error.name}, which is not installed. Install it with: "
            f"{install_command('ray')}"
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
    """Split the arguments, each converted to its field's type; Ray's command line gives strings."""
    # Host and port are Ray's: its proxy is reached by any name.
    serving_types = get_type_hints(Serving)
    del serving_types["host"], serving_types["port"], serving_types["settings"]
    scale_types = get_type_hints(Scale)
    fields = get_type_hints(CCAConfig)
    setting_types = {PRESET: str, **{name: fields[field_of(name)] for name in SERVED}}
    types = {**serving_types, **scale_types, **setting_types}
    values = {}
    for name, value in arguments.items():
        if name not in types:
            raise UserError(f"unknown argument {name!r}. Known: {', '.join(types)}.")
        try:
            values[name] = TypeAdapter(types[name]).validate_python(value)
        except ValidationError:
            kinds = {str: "a text", bool: "true or false"}
            rule = kinds.get(get_args(types[name] | None)[0], "a number")
            got = "another type" if name == "api_key" else repr(value)
            raise UserError(f"{name} must be {rule}, got {got}.") from None
    # As on the command line: who sets the variable believes that clients need the key.
    values.setdefault("api_key", read_key(None))
    scale = Scale(**{name: values.pop(name) for name in scale_types if name in values})
    settings = {name: values.pop(name) for name in setting_types if name in values}
    return Serving(host="", **values, settings=settings), scale
