"""Metrics of a server for Prometheus, and the dashboard that draws them."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path

import prometheus_client
import torch
from experts import WIDTH, mlp

from pymoe.integrations import prometheus
from pymoe.remote import ExpertServer, connect

ROOT = Path(__file__).parents[2]
X = torch.randn(4, WIDTH)


def test_a_server_counts_calls_and_updates() -> None:
    registry = prometheus_client.CollectorRegistry()
    with ExpertServer(mlp("a")) as server, connect(server.address) as there:
        prometheus.register({"left": server}, registry=registry)
        there.backends()[0].forward_pool(X)
        there.backends()[0].backward_pool(X, X)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(name, {"runtime": "left", **labels})

        assert value("pymoe_remote_calls_total", outcome="forward") == 1
        assert value("pymoe_remote_calls_total", outcome="backward") == 1
        assert value("pymoe_remote_expert_updates", expert="a") == 1
        assert value("pymoe_remote_bytes") == 0
        assert value("pymoe_requests_submitted_total", pool="a_forward") == 1


def test_metrics_are_served_to_this_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    with ExpertServer(mlp("a")) as server:
        prometheus.serve(server, port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            assert b"pymoe_remote_bytes" in page.read()


def test_the_dashboard_draws_metrics_that_there_are() -> None:
    text = (ROOT / "docs" / "reference" / "grafana_dashboard.json").read_text()
    drawn = set(re.findall(r"pymoe_[a-z_]+", " ".join(expressions(json.loads(text)))))
    described = set(re.findall(r"`(pymoe_[a-z_]+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text()))
    names = {name.removesuffix("_bucket") for name in drawn}
    assert names <= described
    assert described <= names, "every metric is drawn"


def expressions(dashboard: dict[str, list[dict[str, list[dict[str, str]]]]]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
