"""What the server has done, as Prometheus reads it."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.transforms.engine.stats import Stats

# Prometheus's default buckets end at 10 s, and a long completion takes longer.
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_GAUGES = {
    "running": "completions that run",
    "waiting": "completions that wait",
    "pages_held": "pages of the KV cache that requests hold",
    "pages_free": "pages of the KV cache that no request holds",
    "kv_cache_bytes": "bytes of all pages of the KV cache, on the first rank",
}
_COUNTS = {
    "preempted": "how often a request gave up its pages",
    "prefix_tokens": "tokens of prompts that were found in the prefix cache",
    "captures": "captured graphs",
}


# A collector, whose values are read at a scrape: gauges would have to be set at each step.
class _EngineCounts(Collector):
    """The engine's own counts, as it last reported them."""

    def __init__(self, model: str) -> None:
        self.stats: Stats | None = None
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """The metrics; empty until the engine first reports."""
        if self.stats is None:
            return
        for kind, names in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTS)):
            for name, what in names.items():
                family = kind(f"weft_{name}", what, labels=("model_name",))
                family.add_metric((self._model,), getattr(self.stats, name))
                yield family


class Metrics:
    """Counters of requests and tokens, histograms of latencies, and the engine's counts.

    Args:
        model: the value of the label `model_name` on all of them.
    """

    def __init__(self, model: str) -> None:
        # Not the global registry, which would refuse a second server's metrics of the same names.
        self._registry = CollectorRegistry()
        self._model = model
        options: Any = {"registry": self._registry, "labelnames": ("model_name",)}

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"weft_{name}_seconds", what, buckets=_SECONDS, **options).labels(
                model
            )

        self.first_token = histogram(
            "time_to_first_token", "from a request's body to its first token"
        )
        self.per_token = histogram(
            "time_per_output_token", "mean time between two tokens of a request"
        )
        self.whole = histogram("request", "from a request's body to its last token")
        self._prompt_tokens = Counter("weft_prompt_tokens", "tokens of prompts", **options).labels(
            model
        )
        self._tokens = Counter("weft_generation_tokens", "generated tokens", **options).labels(
            model
        )
        by_reason, by_status = (
            {**options, "labelnames": ("model_name", name)} for name in ("reason", "status")
        )
        self._ended = Counter("weft_completions", "completions that ended, by reason", **by_reason)
        self._refused = Counter(
            "weft_refused", "requests that were answered by an error, by status", **by_status
        )
        self._engine = _EngineCounts(model)
        self._registry.register(self._engine)

    def begin(self, prompt_tokens: int) -> "Clock":
        """Count a request's prompt tokens, and start its clock."""
        self._prompt_tokens.inc(prompt_tokens)
        return Clock(self)

    def count(self, tokens: int) -> None:
        """Count generated tokens."""
        self._tokens.inc(tokens)

    def end(self, reason: str) -> None:
        """Count a completion that ended."""
        self._ended.labels(self._model, reason).inc()

    def refuse(self, status: int) -> None:
        """Count an error."""
        self._refused.labels(self._model, str(status)).inc()

    def text(self, stats: Stats | None) -> tuple[bytes, int, dict[str, str]]:
        """The metrics as a body, a status and headers; without new `stats`, the last ones count."""
        self._engine.stats = stats or self._engine.stats
        return generate_latest(self._registry), 200, {"content-type": CONTENT_TYPE_LATEST}


@attrs.define(eq=False)
class Clock:
    """The latencies of one request."""

    metrics: Metrics
    began: float = attrs.field(factory=time.perf_counter)
    first: float = 0.0
    tokens: int = 0
    ended: bool = False

    def add(self, tokens: int) -> None:
        """Record new tokens."""
        if tokens and not self.tokens:
            self.first = time.perf_counter()
            self.metrics.first_token.observe(self.first - self.began)
        self.tokens += tokens
        self.metrics.count(tokens)

    def end(self, reasons: Sequence[str]) -> None:
        """Record the end of all completions, with their finish reasons."""
        now = time.perf_counter()
        self.ended = True
        self.metrics.whole.observe(now - self.began)
        if self.tokens > 1:
            self.metrics.per_token.observe((now - self.first) / (self.tokens - 1))
        for reason in reasons:
            self.metrics.end(reason)

    def drop(self) -> None:
        """Record the request as aborted, unless it has ended."""
        if not self.ended:
            self.metrics.end("abort")
            self.ended = True
