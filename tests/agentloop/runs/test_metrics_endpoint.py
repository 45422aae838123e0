"""What Prometheus reads of a role, by HTTP."""

from __future__ import annotations

import math
import socket

import pytest

from agentloop.errors import UserError
from agentloop.runs.metrics_endpoint import gauge_name, serve_metrics
from agentloop.runs.sinks.gauges import GaugeSink
from tests.fakes.ranks import free_port
from tests.fakes.scraping import scraped

pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")


def test_the_last_iteration_can_be_read_with_run_and_role_as_labels() -> None:
    port = free_port()
    sink = GaugeSink(serve_metrics(port, role="learner"), "small-001")
    sink.log(1, {"actor/fresh/drift_max": 1.5, "eval/success": 0.25})
    sink.log(2, {"actor/fresh/drift_max": 1.25, "reward/mean-of(a)": math.nan})
    lines = scraped(port)
    labels = '{role="learner",run="small-001"}'
    for expected in (
        f"agentloop_iteration{labels} 2.0",
        f"agentloop_actor_fresh_drift_max{labels} 1.25",
        f"agentloop_eval_success{labels} 0.25",
        f"agentloop_reward_mean_of_a_{labels} NaN",
    ):
        assert expected in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--metrics-port must be free, got {port} \(.*\). Choose another."):
            serve_metrics(port, role="worker")


def test_names_are_those_of_the_metrics_with_nothing_prometheus_refuses() -> None:
    assert gauge_name("actor/fresh/kl") == "agentloop_actor_fresh_kl"
    assert gauge_name("eval/pass@4") == "agentloop_eval_pass_4"
