"""How does a server's latency follow its load: over a day, with and without elasticity, and as the
load rises?

Each variant gets a server of its own in a process of its own, and the same requests at the same
times. Requests come when they are due, however late the server is (an open loop): a server that
falls behind is seen to.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.request_load import Seen, arrivals, day_rate, prompt_of, replay
from corecontext.files import UserError
from corecontext.loading import pick_device
from corecontext.measure import package_path
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress

SHAPES = {
    "llama3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
}
"""Sizes of models whose weights are made up (`--shape`)."""
BINS = 24  # of a day
START_LIMIT_S = 900.0
MODES = ("day", "rising", "saturated")


@dataclass(frozen=True)
class ServeBench:
    """What to measure."""

    mode: str = "day"
    variants: Sequence[str] = ("elastic", "fixed")
    """elastic, fixed (the model's g and s), cca:G:S, or full."""
    model: str | None = None
    shape: str | None = None
    prompt_length: int = 1024
    shared_length: int = 0
    new_tokens: int = 64
    seconds: float = 240.0
    """Of a day, or of each rate of a rising load."""
    base_rate: float = 0.2
    """Requests a second at night, and at the beginning of a rising load."""
    peak_rate: float = 2.0
    """Requests a second at the peak, and the most of a rising load."""
    growth: float = 1.25
    """Of a rising load, from one rate to the next."""
    first_token_limit: float = 2.0
    """Seconds; a rising load ends when the median request waits longer for its first token."""
    requests: int = 32
    """Of a saturated server: all come at once."""
    seed: int = 0
    group_size: int | None = None
    window_size: int | None = None
    cache_mib: int | None = None
    max_running: int = 64
    rows_per_pool: int | None = None
    chunk_size: int | None = None
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be day, rising or saturated, got {self.mode!r}.")
        if self.shape is not None and (self.shape not in SHAPES or self.model is not None):
            raise ValueError(
                f"shape must be one of {', '.join(SHAPES)}, without --model; got {self.shape!r}."
            )
        if not self.variants:
            raise ValueError("variant must be given at least once.")
        for variant in self.variants:
            self.server_options(variant)
        for name in ("prompt_length", "new_tokens", "requests", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.shared_length < self.prompt_length:
            raise ValueError(
                f"shared_length must be at least 0 and less than prompt_length {self.prompt_length}, got "
                f"{self.shared_length}."
            )
        for name in ("seconds", "base_rate", "peak_rate", "first_token_limit"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)}.")
        if self.peak_rate < self.base_rate or self.growth <= 1:
            raise ValueError(
                f"peak_rate must be at least base_rate {self.base_rate} and growth more than 1, got "
                f"{self.peak_rate} and {self.growth}."
            )

    def server_options(self, variant: str) -> list[str]:
        """How a variant is asked of `corecontext serve`."""
        kind, *sizes = variant.split(":")
        if (
            kind == "cca"
            and len(sizes) == 2
            and all(size.isdigit() and int(size) > 0 for size in sizes)
        ):
            return ["--policy", "fixed", "--group-size", sizes[0], "--window-size", sizes[1]]
        own = [
            part
            for name, value in (
                ("--group-size", self.group_size),
                ("--window-size", self.window_size),
            )
            if value is not None
            for part in (name, str(value))
        ]
        if variant == "full":
            return ["--method", "full"]
        if variant in ("elastic", "fixed"):
            return ["--policy", variant, *own]
        raise ValueError(f"variant must be elastic, fixed, full or cca:G:S, got {variant!r}.")

    def params(self, variant: str, **more: Any) -> dict[str, Any]:
        """A record's params."""
        return {
            "mode": self.mode,
            "variant": variant,
            "model": self.shape or self.model or "bundled",
            "random_weights": self.shape is not None,
            "prompt_length": self.prompt_length,
            "shared_length": self.shared_length,
            "new_tokens": self.new_tokens,
            "dtype": self.dtype,
            "max_running": self.max_running,
            "cache_mib": self.cache_mib,
            "chunk_size": self.chunk_size,
            **(
                {"requests": self.requests}
                if self.mode == "saturated"
                else {"seconds": self.seconds}
            ),
            "seed": self.seed,
            **more,
        }


@contextmanager
def served(bench: ServeBench, variant: str) -> Iterator[str]:
    """A server of this variant while the block runs; gives its URL.

    Raises:
        UserError: it did not start; says what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = bench.server_options(variant)
        if bench.shape is not None:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[bench.shape]))
            options += ["--model", folder, "--random-weights"]
        elif bench.model is not None:
            options += ["--model", bench.model]
        for name in ("cache_mib", "max_running", "rows_per_pool", "chunk_size", "dtype", "device"):
            value = getattr(bench, name)
            if value is not None:
                options += ["--" + name.replace("_", "-"), str(value)]
        log = Path(folder) / "log"
        env = {key: value for key, value in package_path().items() if key != "CORECONTEXT_API_KEY"}
        with log.open("w") as out:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "corecontext",
                    "serve",
                    "--name",
                    "served",
                    "--port",
                    "0",
                    "--queue-limit",
                    "1000000",
                    "--time-limit",
                    "86400",
                    *options,
                ],
                stdout=out,
                stderr=out,
                env=env,
            )
        try:
            yield _wait_for(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for line in dict.fromkeys(log.read_text(errors="replace").splitlines()):
                if (
                    "Warning: " in line
                ):  # such as of steps that run uncaptured, without which times say little
                    print(f"{variant}: {line}", file=sys.stderr)


def _wait_for(process: subprocess.Popen, log: Path) -> str:
    """The URL of a server as soon as it listens."""
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text(errors="replace").splitlines():
            if (
                line.startswith("{")
                and line.endswith("}")
                and json.loads(line)["event"] == "listening"
            ):
                return f"http://127.0.0.1:{json.loads(line)['port']}"
        time.sleep(0.1)
    said = [
        line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")
    ]
    raise UserError(
        f"the server did not start: {said[-1].removeprefix('error: ') if said else 'see its options'}"
    )


def run_serve_bench(
    bench: ServeBench, on_records: Callable[[list[Record]], Any] = lambda new: None
) -> list[Record]:
    """Measure every variant; records are handed on as soon as they are made.

    Raises:
        UserError: a server did not start, or the client's library is missing.
    """
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise UserError(
            "bench serve needs httpx, which is not installed. Install it with: "
            "pip install 'corecontext[serve]' httpx"
        ) from None
    device, records = device_name(pick_device(bench.device)), []
    for variant in bench.variants:
        with served(bench, variant) as url:
            warm_up(bench, url)
            measure = {"day": _day, "rising": _rising, "saturated": _saturated}[bench.mode]
            for new in measure(bench, variant, url, device):
                records += new
                on_records(new)
    return records


def warm_up(bench: ServeBench, url: str) -> None:
    """A few requests at once, so that what is compiled, captured and allocated at first is not
    measured."""
    short = replace(bench, new_tokens=min(bench.new_tokens, 16))
    asyncio.run(_replay(short, url, [0.0] * 4, first_number=-4))


async def _replay(
    bench: ServeBench,
    url: str,
    due: Sequence[float],
    first_number: int = 0,
    on_done: Callable[[Seen], Any] = lambda seen: None,
) -> list[Seen]:
    return await replay(
        url,
        "served",
        due,
        lambda number: prompt_of(
            first_number + number, bench.prompt_length, bench.shared_length, bench.seed
        ),
        bench.new_tokens,
        on_done,
    )


def _shown(
    bench: ServeBench, variant: str, url: str, due: Sequence[float], text: str, first_number: int
) -> list[Seen]:
    with progress(f"{variant}, {text}, {len(due)} requests", max(1, len(due))) as advance:
        return asyncio.run(_replay(bench, url, due, first_number, lambda seen: advance(1)))


def _day(bench: ServeBench, variant: str, url: str, device: str) -> Iterator[list[Record]]:
    """A day of traffic; records by the hour (a 24th of it) in which requests came."""
    due = arrivals(
        lambda t: day_rate(t, bench.seconds, bench.base_rate, bench.peak_rate),
        bench.peak_rate,
        bench.seconds,
        bench.seed,
    )
    seen = _shown(bench, variant, url, due, "a day", 0)
    width = bench.seconds / BINS
    for hour in range(BINS):
        inside = [one for one in seen if hour * width <= one.due < (hour + 1) * width]
        ended = [
            one
            for one in seen
            if hour * width <= one.end < (hour + 1) * width and one.error is None
        ]
        more = {"hour": hour, "offered_per_s": len(inside) / width}
        yield _summary(bench, variant, device, inside, ended, width, **more)
    yield _summary(
        bench,
        variant,
        device,
        seen,
        [one for one in seen if one.error is None],
        max([bench.seconds, *(one.end for one in seen)]),
        offered_per_s=len(due) / bench.seconds,
    )


def _rising(bench: ServeBench, variant: str, url: str, device: str) -> Iterator[list[Record]]:
    """Rate after rate until the median request waits too long; each starts on an idle server."""
    rate, held, number = bench.base_rate, 0.0, 0
    while rate <= bench.peak_rate * (1 + 1e-9):
        due = arrivals(lambda t: rate, rate, bench.seconds, bench.seed) or [0.0]  # noqa: B023, called at once
        seen = _shown(bench, variant, url, due, f"{rate:.3g} a second", number)
        number += len(due)
        good = [one for one in seen if one.error is None]
        yield _summary(
            bench,
            variant,
            device,
            seen,
            good,
            max(bench.seconds, *(one.end for one in seen), 0.0),
            rate=rate,
            offered_per_s=len(due) / bench.seconds,
        )
        waits = [float("inf") if one.first_token_s is None else one.first_token_s for one in seen]
        if statistics.median(waits) > bench.first_token_limit:
            break
        held, rate = rate, rate * bench.growth
    else:
        yield [
            make_record(
                "serve.limit_rate",
                held,
                bench.params(variant, first_token_limit=bench.first_token_limit, reached=False),
                device=device,
            )
        ]
        return
    yield [
        make_record(
            "serve.limit_rate",
            held,
            bench.params(variant, first_token_limit=bench.first_token_limit, reached=True),
            device=device,
        )
    ]


def _saturated(bench: ServeBench, variant: str, url: str, device: str) -> Iterator[list[Record]]:
    """All requests at once: what a server does that is never idle, from the first token asked to
    the last one made."""
    seen = _shown(bench, variant, url, [0.0] * bench.requests, "all at once", 0)
    good = [one for one in seen if one.error is None]
    yield _summary(
        bench, variant, device, seen, good, max(one.end for one in seen), offered_per_s=None
    )


def _summary(
    bench: ServeBench,
    variant: str,
    device: str,
    came: Sequence[Seen],
    ended: Sequence[Seen],
    seconds: float,
    **more: Any,
) -> list[Record]:
    """Records of the requests that came in some time, and of those that ended in it without an
    error."""
    good, params = [one for one in came if one.error is None], bench.params(variant, **more)
    records = [
        make_record("serve.requests_per_s", len(ended) / seconds, params, device=device),
        make_record(
            "serve.tokens_per_s", sum(one.tokens for one in ended) / seconds, params, device=device
        ),
        make_record("serve.failed", len(came) - len(good), params, device=device),
    ]
    for name, values in (
        (
            "serve.first_token_s",
            [one.first_token_s for one in good if one.first_token_s is not None],
        ),
        (
            "serve.next_token_ms",
            [1000 * one.next_token_s for one in good if one.next_token_s is not None],
        ),
    ):
        if values:
            records.append(make_record(name, values, {**params, "quantile": 0.5}, device=device))
            records.append(
                make_record(
                    name, percentile(values, 0.99), {**params, "quantile": 0.99}, device=device
                )
            )
    for (g, s), count in sorted(
        Counter(one.setting for one in good if one.setting[0] is not None).items()
    ):
        records.append(
            make_record(
                "serve.setting_share",
                count / len(good),
                {**params, "group_size": g, "window_size": s},
                device=device,
            )
        )
    return records


def percentile(values: Sequence[float], quantile: float) -> float:
    """The smallest value that at least this share of all do not exceed."""
    ordered = sorted(values)
    return ordered[
        min(len(ordered) - 1, max(0, -(-round(quantile * 1e6) * len(ordered) // 1000000) - 1))
    ]


def print_table(records: Sequence[Record]) -> None:
    """What was measured, one row for each variant (and rate)."""
    from rich.table import Table

    from corecontext.terminal import console

    table = Table()
    for title in (
        "variant",
        "offered /s",
        "done /s",
        "tokens /s",
        "first token, s: 50 %",
        "99 %",
        "next token, ms: 50 %",
        "99 %",
        "failed",
        "g, s",
    ):
        table.add_column(title, justify="left" if title in ("variant", "g, s") else "right")
    totals = [r for r in records if r.name == "serve.requests_per_s" and "hour" not in r.params]
    for total in totals:
        same = [r for r in records if total.params.items() <= r.params.items()]

        def value(name: str, quantile: float | None = None, same: list[Record] = same) -> str:
            found = [
                r.value for r in same if r.name == name and r.params.get("quantile") == quantile
            ]
            return f"{found[-1]:.3g}" if found else "-"

        shares = [
            f"{r.params['group_size']}, {r.params['window_size']}: {r.value:.0%}"
            for r in same
            if r.name == "serve.setting_share"
        ]
        offered = total.params["offered_per_s"]
        table.add_row(
            total.params["variant"],
            "-" if offered is None else f"{offered:.3g}",
            f"{total.value:.3g}",
            value("serve.tokens_per_s"),
            *(
                value(name, quantile)
                for name in ("serve.first_token_s", "serve.next_token_ms")
                for quantile in (0.5, 0.99)
            ),
            value("serve.failed"),
            "; ".join(shares),
        )
    console().print(table)
    for r in records:
        if r.name == "serve.limit_rate":
            more = "" if r.params["reached"] else " or more, all that was offered"
            print(
                f"{r.params['variant']}: the median request waits at most {r.params['first_token_limit']:g} s for "
                f"its first token at {r.value:.3g} requests a second{more}."
            )
