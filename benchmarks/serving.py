"""Measure a server's latency under load: over a day, as the load rises, and saturated.

Each variant gets a server of its own in a process of its own, and the same requests at the same
times. Requests are sent when they are due, however late the server is (an open loop), so that a
server that falls behind is measured as late.
"""

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
from benchmarks.serving_settings import SERVED_SHAPES, ServeBench
from corecontext.config import CCAConfig
from corecontext.files import UserError, install_command
from corecontext.loading import pick_device
from corecontext.measure import package_path
from corecontext.record import Record, device_name, make_record
from corecontext.terminal import progress
from corecontext.visibility import num_sinks

BINS = 24  # of a day
START_LIMIT_S = 900.0
SERVE = ["corecontext", "serve"]
OPTIONS = ["--name", "served", "--port", "0", "--queue-limit", "1000000", "--time-limit", "86400"]


@contextmanager
def served(bench: ServeBench, variant: str) -> Iterator[str]:
    """Run a server of this variant while the block lasts; yields its URL.

    Raises:
        UserError: it did not start; with the server's error.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = SERVE
        options = bench.server_options(variant)
        if bench.shape is not None:
            shape = SERVED_SHAPES[bench.shape] | {"cca": CCAConfig.paper().to_dict()}
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            program = ["benchmarks.random_server"]
            if bench.replays(variant):
                # All groups are those that the first token of an answer sees.
                config = CCAConfig.preset(variant)
                sinks = num_sinks(config.sink_size, config.group_size)
                length = bench.prompt_length - config.window_size - sinks
                options += ["--replay", str(bench.hit_share), str(length)]
            options += ["--model", folder]
        options += bench.options("model", "cache_mib", "host_cache_mib", "max_running")
        options += bench.options("rows_per_pool", "chunk_size", "dtype", "device")
        log = Path(folder) / "log"
        env = {key: value for key, value in package_path().items() if key != "CORECONTEXT_API_KEY"}
        with log.open("w") as out:
            command = [sys.executable, "-m", *program, *OPTIONS, *options]
            process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
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
                # Such as of steps that run uncaptured, whose times say little.
                if "Warning: " in line or '"level": "error"' in line:
                    print(f"{variant}: {line}", file=sys.stderr)


def _wait_for(process: subprocess.Popen, log: Path) -> str:
    """Return the URL of a server as soon as it listens."""
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text(errors="replace").splitlines():
            event = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
            if event.get("event") == "listening":
                return f"http://127.0.0.1:{event['port']}"
        time.sleep(0.1)
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = errors[-1] if errors else "see its options"
    raise UserError(f"the server did not start: {reason}")


def run_serve_bench(
    bench: ServeBench, on_records: Callable[[list[Record]], Any] = lambda new: None
) -> list[Record]:
    """Measure every variant; records are handed over as soon as they are made.

    Raises:
        UserError: a server did not start, or the client's library is missing.
    """
    try:
        import httpx  # noqa: F401
    except ImportError:
        raise UserError(
            "bench serve needs httpx, which is not installed. Install it with: "
            f"{install_command('serve')} httpx"
        ) from None
    device = device_name(pick_device(bench.device))
    records: list[Record] = []
    for variant in bench.variants:
        with served(bench, variant) as url:
            for load in bench.loads():
                warm_up(load, url)
                trial = _Trial(load, variant, url, device)
                measure = {"day": trial.day, "rising": trial.rising, "saturated": trial.saturated}
                for new in measure[bench.mode]():
                    records += new
                    on_records(new)
    return records


def warm_up(bench: ServeBench, url: str) -> None:
    """Send other requests at once, so that compiling, capturing and allocating is not measured: a
    few short ones, or all of a saturated server's, whose steps are captured for 1, 4, 16, 17, ...
    rows."""
    count = 4
    if bench.mode == "saturated":
        count = bench.requests
    else:
        bench = replace(bench, new_tokens=min(bench.new_tokens, 16))
    asyncio.run(_replay(bench, url, [0.0] * count, first_number=-count))


async def _replay(
    bench: ServeBench,
    url: str,
    due: Sequence[float],
    first_number: int = 0,
    on_done: Callable[[Seen], Any] = lambda seen: None,
) -> list[Seen]:
    """Send requests when they are due, their prompts numbered from `first_number` on."""

    def prompt(number: int) -> list[int]:
        number += first_number
        return prompt_of(number, bench.prompt_length, bench.shared_length, bench.seed)

    return await replay(url, "served", due, prompt, bench.new_tokens, on_done)


@dataclass
class _Trial:
    """Measurements of one variant."""

    bench: ServeBench
    variant: str
    url: str
    device: str

    def day(self) -> Iterator[list[Record]]:
        """Replay a day of traffic; yields records by the hour (a 24th of it) of arrival."""
        bench = self.bench

        def rate(second: float) -> float:
            return day_rate(second, bench.seconds, bench.base_rate, bench.peak_rate)

        due = arrivals(rate, bench.peak_rate, bench.seconds, bench.seed)
        requests = self._send(due, "a day", 0)
        width = bench.seconds / BINS
        for hour in range(BINS):
            begin, end = hour * width, (hour + 1) * width
            arrived = [seen for seen in requests if begin <= seen.due < end]
            ended = [seen for seen in _good(requests) if begin <= seen.end < end]
            offered = len(arrived) / width
            yield self._summary(arrived, ended, width, hour=hour, offered_per_s=offered)
        seconds = max([bench.seconds, *(seen.end for seen in requests)])
        offered = len(due) / bench.seconds
        yield self._summary(requests, _good(requests), seconds, offered_per_s=offered)

    def rising(self) -> Iterator[list[Record]]:
        """Replay rate after rate, each from an idle server, until the median wait is too long."""
        bench = self.bench
        rate = bench.base_rate
        sustained = 0.0
        number = 0
        reached = False
        while rate <= bench.peak_rate * (1 + 1e-9) and not reached:
            due = arrivals(lambda t: rate, rate, bench.seconds, bench.seed) or [0.0]  # noqa: B023, called at once
            requests = self._send(due, f"{rate:.3g} a second", number)
            number += len(due)
            seconds = max(bench.seconds, *(seen.end for seen in requests), 0.0)
            offered = len(due) / bench.seconds
            good = _good(requests)
            yield self._summary(requests, good, seconds, rate=rate, offered_per_s=offered)
            waits = [
                float("inf") if seen.first_token_s is None else seen.first_token_s
                for seen in requests
            ]
            reached = statistics.median(waits) > bench.first_token_limit
            if not reached:
                sustained = rate
                rate *= bench.growth
        limit = {"first_token_limit": bench.first_token_limit, "reached": reached}
        params = bench.params(self.variant, **limit)
        yield [make_record("serve.limit_rate", sustained, params, device=self.device)]

    def saturated(self) -> Iterator[list[Record]]:
        """Send all requests at once, from the first one sent to the last token made."""
        requests = self._send([0.0] * self.bench.requests, "all at once", 0)
        seconds = max(seen.end for seen in requests)
        yield self._summary(requests, _good(requests), seconds, offered_per_s=None)

    def _send(self, due: Sequence[float], text: str, first_number: int) -> list[Seen]:
        """Send requests with a progress line."""
        title = f"{self.variant}, {text}, {len(due)} requests"
        with progress(title, max(1, len(due))) as advance:
            requests = _replay(self.bench, self.url, due, first_number, lambda seen: advance(1))
            seen = asyncio.run(requests)
        for error, count in Counter(each.error for each in seen if each.error).items():
            print(f"{self.variant}: {count} requests failed: {error}", file=sys.stderr)
        return seen

    def _summary(
        self, arrived: Sequence[Seen], ended: Sequence[Seen], seconds: float, **more: Any
    ) -> list[Record]:
        """Return records of the requests that arrived in some time, and ended in it."""
        good = _good(arrived)
        params = self.bench.params(self.variant, **more)
        tokens = sum(seen.tokens for seen in ended)
        values: list[tuple[str, float | list[float], dict[str, Any]]] = [
            ("requests_per_s", len(ended) / seconds, {}),
            ("tokens_per_s", tokens / seconds, {}),
            ("failed", len(arrived) - len(good), {}),
        ]
        waits = [seen.first_token_s for seen in good if seen.first_token_s is not None]
        steps = [1000 * seen.next_token_s for seen in good if seen.next_token_s is not None]
        for name, samples in (("first_token_s", waits), ("next_token_ms", steps)):
            if samples:
                values.append((name, samples, {"quantile": 0.5}))
                values.append((name, percentile(samples, 0.99), {"quantile": 0.99}))
        settings = Counter(seen.setting for seen in good if seen.setting[0] is not None)
        for (g, s), count in sorted(settings.items()):
            setting = {"group_size": g, "window_size": s}
            values.append(("setting_share", count / len(good), setting))
        return [
            make_record(f"serve.{name}", value, {**params, **detail}, device=self.device)
            for name, value, detail in values
        ]


def _good(requests: Sequence[Seen]) -> list[Seen]:
    """Return the requests that ended without an error."""
    return [seen for seen in requests if seen.error is None]


def percentile(values: Sequence[float], quantile: float) -> float:
    """Return the smallest value that at least this share of all do not exceed."""
    ordered = sorted(values)
    rank = -(-round(quantile * 1e6) * len(ordered) // 1000000) - 1
    return ordered[min(len(ordered) - 1, max(0, rank))]
