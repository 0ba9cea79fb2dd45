"""What the engine and the HTTP side tell is what Prometheus reads."""

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from llm.observer import Observer
from metrics import ServiceMetrics
from tests.unit.http_for_tests import Client


def values(metrics: ServiceMetrics) -> dict[str, float]:
    """Samples without labels, and those with one as name{value}."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_every_report_of_the_engine_is_counted() -> None:
    metrics = ServiceMetrics()
    observer: Observer = metrics
    observer.queued(0.2)
    observer.first_token(0.3)
    observer.next_token(0.01)
    observer.next_token(0.02)
    observer.prompt_tokens(10, 0)
    observer.prompt_tokens(20, 16)
    observer.output_tokens(3)
    observer.preempted()
    observer.worker_restarted()
    observer.finished("stop", 1.5)
    observer.finished("queue_full", 0.0)
    observer.step(scheduled=3, tokens=12, seconds=0.05, forward_seconds=0.04)
    observer.gauges(running=3, waiting=2, used_blocks=7, num_blocks=64)
    got = values(metrics)
    expected = {
        "quartet_queue_seconds_sum": 0.2,
        "quartet_time_to_first_token_seconds_sum": 0.3,
        "quartet_inter_token_seconds_count": 2,
        "quartet_prompt_tokens_total": 30,
        "quartet_cached_prompt_tokens_total": 16,
        "quartet_prefix_hits_total": 1,
        "quartet_output_tokens_total": 3,
        "quartet_preemptions_total": 1,
        "quartet_worker_restarts_total": 1,
        "quartet_sequences_total{stop}": 1,
        "quartet_sequences_total{queue_full}": 1,
        "quartet_sequence_seconds_count": 2,
        "quartet_step_seconds_sum": 0.05,
        "quartet_step_forward_seconds_sum": 0.04,
        "quartet_step_tokens_sum": 12,
        "quartet_step_sequences_total": 3,
        "quartet_running_sequences": 3,
        "quartet_waiting_sequences": 2,
        "quartet_kv_blocks_used": 7,
        "quartet_kv_blocks": 64,
    }
    assert {name: pytest.approx(got[name]) for name in expected} == expected


def test_a_request_is_in_flight_until_it_ends() -> None:
    metrics = ServiceMetrics()
    metrics.request_started()
    assert values(metrics)["quartet_http_requests_in_flight"] == 1
    metrics.request_ended(method="POST", route="/generate", status=499, seconds=0.1)
    got = values(metrics)
    assert got["quartet_http_requests_in_flight"] == 0
    assert got["quartet_http_requests_total{POST,/generate,499}"] == 1
    assert got["quartet_http_request_seconds_count{/generate}"] == 1


def test_two_services_in_one_process_count_apart() -> None:
    one, other = ServiceMetrics(), ServiceMetrics()
    one.output_tokens(5)
    assert values(other)["quartet_output_tokens_total"] == 0
    assert not any(family.name.startswith("quartet") for family in REGISTRY.collect())


async def test_the_endpoint_is_prometheus_text(client: Client) -> None:
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert {family.name for family in text_string_to_metric_families(answer.body.decode())} >= {"quartet_kv_blocks"}
