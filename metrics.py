"""What the service counts, in Prometheus' words, in a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds
_TOKEN_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)  # seconds
_STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens


class ServiceMetrics:
    """An `llm.observer.Observer`, and the counters of the HTTP side. Any thread may call; nothing blocks or raises."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._build_http()
        self._build_sequences()
        self._build_engine()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    # HTTP

    def _build_http(self) -> None:
        self._requests = Counter(
            "quartet_http_requests",
            "Requests by route and status; 499: the client left",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._request_seconds = Histogram(
            "quartet_http_request_seconds",
            "From a request's head to the end of its answer",
            ("route",),
            buckets=_WAITS,
            registry=self._registry,
        )
        self._in_flight = Gauge("quartet_http_requests_in_flight", "Requests being answered now", registry=self._registry)

    def request_started(self) -> None:
        self._in_flight.inc()

    def request_ended(self, *, method: str, route: str, status: int, seconds: float) -> None:
        self._in_flight.dec()
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    # Sequences

    def _build_sequences(self) -> None:
        registry = self._registry
        self._queue_seconds = Histogram(
            "quartet_queue_seconds", "From arrival to the first step", buckets=_WAITS, registry=registry
        )
        self._first_token_seconds = Histogram(
            "quartet_time_to_first_token_seconds", "From arrival to the first token", buckets=_WAITS, registry=registry
        )
        self._next_token_seconds = Histogram(
            "quartet_inter_token_seconds", "Between two tokens of a sequence", buckets=_TOKEN_GAPS, registry=registry
        )
        self._sequence_seconds = Histogram(
            "quartet_sequence_seconds", "From arrival to the end", buckets=_WAITS, registry=registry
        )
        self._sequences = Counter("quartet_sequences", "Sequences that ended, by how", ("outcome",), registry=registry)
        self._prompt_tokens = Counter("quartet_prompt_tokens", "Tokens of admitted prompts", registry=registry)
        self._cached_tokens = Counter(
            "quartet_cached_prompt_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self._prefix_hits = Counter("quartet_prefix_hits", "Prompts of which a part was in the prefix cache", registry=registry)
        self._output_tokens = Counter("quartet_output_tokens", "Tokens generated", registry=registry)

    def queued(self, seconds: float) -> None:
        self._queue_seconds.observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token_seconds.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._next_token_seconds.observe(seconds)

    def prompt_tokens(self, count: int, cached: int) -> None:
        self._prompt_tokens.inc(count)
        self._cached_tokens.inc(cached)
        if cached:
            self._prefix_hits.inc()

    def output_tokens(self, count: int) -> None:
        self._output_tokens.inc(count)

    def finished(self, outcome: str, seconds: float) -> None:
        self._sequences.labels(outcome).inc()
        self._sequence_seconds.observe(seconds)

    # Engine

    def _build_engine(self) -> None:
        registry = self._registry
        self._running = Gauge("quartet_running_sequences", "Sequences in the batch", registry=registry)
        self._waiting = Gauge("quartet_waiting_sequences", "Sequences in the queue", registry=registry)
        self._used_blocks = Gauge("quartet_kv_blocks_used", "KV cache blocks held by sequences", registry=registry)
        self._num_blocks = Gauge("quartet_kv_blocks", "KV cache blocks there are", registry=registry)
        self._steps = Histogram(
            "quartet_step_seconds", "One step of the engine, all in all", buckets=_TOKEN_GAPS, registry=registry
        )
        self._forward_seconds = Histogram(
            "quartet_step_forward_seconds", "Forward and sampling in one step", buckets=_TOKEN_GAPS, registry=registry
        )
        self._step_tokens = Histogram(
            "quartet_step_tokens", "Tokens computed in one step", buckets=_STEP_SIZES, registry=registry
        )
        self._step_sequences = Counter(
            "quartet_step_sequences", "Sequences scheduled, summed over the steps", registry=registry
        )
        self._preemptions = Counter("quartet_preemptions", "Sequences that lost their blocks to others", registry=registry)
        self._restarts = Counter("quartet_worker_restarts", "Workers started after one died", registry=registry)

    def step(self, *, scheduled: int, tokens: int, seconds: float, forward_seconds: float) -> None:
        self._steps.observe(seconds)
        self._forward_seconds.observe(forward_seconds)
        self._step_tokens.observe(tokens)
        self._step_sequences.inc(scheduled)

    def gauges(self, *, running: int, waiting: int, used_blocks: int, num_blocks: int) -> None:
        self._running.set(running)
        self._waiting.set(waiting)
        self._used_blocks.set(used_blocks)
        self._num_blocks.set(num_blocks)

    def preempted(self) -> None:
        self._preemptions.inc()

    def worker_restarted(self) -> None:
        self._restarts.inc()
