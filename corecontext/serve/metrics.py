"""What Prometheus reads: counters and histograms of requests that ended, and gauges read off the
scheduler."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from corecontext.serve.scheduler import Job, Scheduler

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)


def label(value: int | None) -> str:
    """A g or s; "none" before a request started, under full attention, and a g where each layer has
    its own."""
    return "none" if value is None else str(value)


def setting(job: Job) -> tuple[int | None, int | None]:
    """The g and s that a request got; no g where each layer has its own."""
    if job.config is None:
        return None, None
    return None if job.config.varies else job.config.group_size, job.config.window_size


class Metrics:
    """All metrics of one server."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.registry = scheduler, CollectorRegistry()
        self.requests = Counter(
            "corecontext_requests",
            "Requests that ended, by how.",
            ["outcome"],
            registry=self.registry,
        )
        self.refused = Counter(
            "corecontext_refused",
            "Answers under /v1 that were errors, by HTTP status (of streams "
            "only those that did not begin).",
            ["status"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "corecontext_tokens",
            "Tokens: of prompts read, of prompts found read, and made.",
            ["kind"],
            registry=self.registry,
        )
        self.settings = Counter(
            "corecontext_settings",
            "Requests that ended, by the g and s they got.",
            ["group_size", "window_size"],
            registry=self.registry,
        )
        self.first_token = Histogram(
            "corecontext_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.per_token = Histogram(
            "corecontext_time_per_token_seconds",
            "Mean of a request's tokens after the first.",
            buckets=TOKEN_SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)

    def ended(self, job: Job, now: float) -> None:
        """Count a request that has ended."""
        self.requests.labels(job.ended).inc()
        self.tokens.labels("prompt").inc(max(0, job.read - job.cached_tokens))
        self.tokens.labels("prompt_cached").inc(job.cached_tokens)
        self.tokens.labels("made").inc(job.made)
        g, s = setting(job)
        self.settings.labels(label(g), label(s)).inc()
        if job.first_token_at is not None:
            self.first_token.observe(job.first_token_at - job.arrived)
            if job.made > 1:
                self.per_token.observe((now - job.first_token_at) / (job.made - 1))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What is now."""
        scheduler = self.scheduler
        yield GaugeMetricFamily(
            "corecontext_queue_length", "Requests that wait.", len(scheduler.waiting)
        )
        held = GaugeMetricFamily("corecontext_cache_bytes", "Bytes of caches.", labels=["what"])
        for what, value in (
            ("budget", scheduler.cache_bytes),
            ("used", scheduler.cache_bytes_used),
            ("allocated", scheduler.cache_bytes_allocated),
            ("prefixes", scheduler.prefixes.nbytes),
        ):
            held.add_metric([what], value)
        yield held
        running = GaugeMetricFamily(
            "corecontext_running",
            "Requests that run, by g and s.",
            labels=["group_size", "window_size"],
        )
        for (g, s), count in Count(map(setting, scheduler.active())).items():
            running.add_metric([label(g), label(s)], count)
        yield running

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)
