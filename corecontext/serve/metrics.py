"""Export metrics to Prometheus: counters and histograms of requests that ended, gauges of the
scheduler."""

from collections import Counter as Count
from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from corecontext.inference.policy import SIZE_NAMES
from corecontext.serve.request import Slot
from corecontext.serve.scheduler import Scheduler

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
"""Bounds of the histogram of times to the first token."""
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)
"""Bounds of the histogram of times per token."""


def sizes_of(slot: Slot) -> tuple[int | None, int | None, int | None]:
    """Return the (g, s, k) that a request got; g is None where each layer has its own."""
    config = slot.config
    if config is None:
        return None, None, None
    if config.varies:
        return None, config.window_size, config.fetch_groups
    return config.group_size, config.window_size, config.fetch_groups


def labels_of(slot: Slot, by_length: bool) -> tuple[str, ...]:
    """Return the labels of a request's g, s and k.

    A label is "none" before the request started, under full attention, and for g where each layer
    has its own. All are "other" for sizes that clients choose: each different set of labels stays
    in memory.

    Args:
        by_length: Whether g follows the length of a prompt, which clients choose.
    """
    # mutant serve: clients make metrics without limit
    if slot.config is not None and (by_length or slot.request.chooses_sizes):
        return ("other",) * len(SIZE_NAMES)
    return tuple("none" if size is None else str(size) for size in sizes_of(slot))


class Metrics:
    """All metrics of one server."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        config = scheduler.admission.config
        self.by_length = config.num_groups is not None and scheduler.policy is None
        """Whether g follows the length of a prompt."""
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter("corecontext_requests", "Requests that ended, by how.", ["outcome"])
        self.refused = counter(
            "corecontext_refused",
            "Answers under /v1 that were errors, by HTTP status (of streams only those that did "
            "not begin).",
            ["status"],
        )
        self.tokens = counter(
            "corecontext_tokens", "Tokens by kind: prompt, cached prompt, generated.", ["kind"]
        )
        self.settings = counter(
            "corecontext_settings", "Requests that ended, by g, s and k.", SIZE_NAMES
        )
        self.first_token = histogram(
            "corecontext_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=SECONDS,
        )
        self.per_token = histogram(
            "corecontext_time_per_token_seconds",
            "Mean of a request's tokens after the first.",
            buckets=TOKEN_SECONDS,
        )
        self.registry.register(self)

    def ended(self, slot: Slot, now: float) -> None:
        """Count a request that has ended."""
        self.requests.labels(slot.end_reason).inc()
        self.tokens.labels("prompt").inc(max(0, slot.read - slot.cached_tokens))
        self.tokens.labels("prompt_cached").inc(slot.cached_tokens)
        self.tokens.labels("made").inc(slot.made)
        self.settings.labels(*labels_of(slot, self.by_length)).inc()
        if slot.first_token_at is not None:
            self.first_token.observe(slot.first_token_at - slot.request.arrived)
            if slot.made > 1:
                self.per_token.observe((now - slot.first_token_at) / (slot.made - 1))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges as they are now."""
        scheduler = self.scheduler
        memory = scheduler.memory
        yield GaugeMetricFamily(
            "corecontext_queue_length", "Requests that wait.", len(scheduler.waiting)
        )
        cache_bytes = GaugeMetricFamily(
            "corecontext_cache_bytes", "Bytes of caches.", labels=["what"]
        )
        used, allocated = memory.counted()
        prefixes = memory.prefixes.counted()
        cache_bytes.add_metric(["budget"], memory.budget)
        cache_bytes.add_metric(["used"], used.device)
        cache_bytes.add_metric(["allocated"], allocated.device + prefixes.device)
        cache_bytes.add_metric(["prefixes"], prefixes.device)
        yield cache_bytes
        if memory.shape.host_rate:
            host_bytes = GaugeMetricFamily(
                "corecontext_host_bytes", "Bytes of raw tokens in host memory.", labels=["what"]
            )
            host_bytes.add_metric(["budget"], memory.budget / memory.shape.host_rate)
            host_bytes.add_metric(["used"], used.host)
            host_bytes.add_metric(["allocated"], allocated.host + prefixes.host)
            host_bytes.add_metric(["prefixes"], prefixes.host)
            yield host_bytes
        running = GaugeMetricFamily(
            "corecontext_running", "Requests that run, by g, s and k.", labels=SIZE_NAMES
        )
        active = [labels_of(slot, self.by_length) for slot in scheduler.active()]
        for labels, count in Count(active).items():
            running.add_metric(labels, count)
        yield running
