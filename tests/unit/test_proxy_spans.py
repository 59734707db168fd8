# SPDX-License-Identifier: Apache-2.0
"""Spans of the router, at real collectors of both protocols."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the proxy extra is not installed")
pytest.importorskip("uvicorn", reason="the proxy extra is not installed")
pytest.importorskip("starlette", reason="the proxy extra is not installed")
pytest.importorskip("prometheus_client", reason="the proxy extra is not installed")

from aiohttp import web

from ec_connector.errors import ConfigError
from ec_connector.proxy.spans import GRPC, HTTP, PROTOCOL, Spans, spans_to
from tests.router.net import (
    announcing,
    answering,
    closed_port,
    entry,
    image,
    network,
    request,
    run,
)  # fmt: skip

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}


@contextmanager
def http_collector(spans: list[Any]) -> Iterator[str]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            _keep(ExportTraceServiceRequest.FromString(raw), spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: the test looks at ``spans``."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()
        thread.join()


@contextmanager
def grpc_collector(spans: list[Any]) -> Iterator[str]:
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    class Service(services.TraceServiceServicer):  # type: ignore[misc] # generated, untyped
        def Export(self, received: Any, _context: Any) -> Any:
            _keep(received, spans)
            return messages.ExportTraceServiceResponse()

    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        services.add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"http://127.0.0.1:{port}"
        server.stop(None).wait()


def _keep(received: Any, spans: list[Any]) -> None:
    for resource in received.resource_spans:
        for scope in resource.scope_spans:
            spans.extend(scope.spans)


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


@pytest.mark.parametrize(
    ("protocol", "collector"),
    [(GRPC, grpc_collector), (HTTP, http_collector)],
    ids=["grpc", "http"],
)
def test_one_trace_from_the_client_to_each_server(
    protocol: str, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's span is a child of the client's, and the servers' will be those of its hops."""
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")
    monkeypatch.setenv(PROTOCOL, protocol)
    spans: list[Any] = []
    seen: dict[str, Any] = {}

    async def test(endpoint: str) -> None:
        options = {"otlp_traces_endpoint": endpoint}
        async with network([announcing({"hash": entry(0)})], [answering], **options) as net:
            async with net.chat(request(image("a")), headers=TRACED) as response:
                assert response.status == 200
            seen["encode"] = net.encoder.headers[0].getall("traceparent")
            seen["decode"] = net.decoder.headers[0].getall("traceparent")
            seen["url"] = net.encoder.url

    with collector(spans) as endpoint:
        run(lambda: test(endpoint))

    of = {span.name: span for span in spans}
    assert sorted(of) == ["ec_proxy_decode", "ec_proxy_encode", "ec_proxy_request"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    whole = of["ec_proxy_request"]
    assert whole.parent_span_id.hex() == PARENT
    assert attributes(whole)["gen_ai.request.id"] == "mine"
    assert attributes(whole)["http.response.status_code"] == 200
    assert 0 < attributes(whole)["gen_ai.latency.time_to_first_token"] < 30
    assert attributes(of["ec_proxy_encode"])["server.address"] == seen["url"]
    for role in ("encode", "decode"):
        hop = of[f"ec_proxy_{role}"]
        assert hop.parent_span_id == whole.span_id
        assert seen[role] == [f"00-{TRACE}-{hop.span_id.hex()}-01"]
        assert hop.end_time_unix_nano <= whole.end_time_unix_nano


def test_failures_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that fails is an error of its hop alone; a request without answer is one too."""
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")
    monkeypatch.setenv(PROTOCOL, HTTP)
    spans: list[Any] = []

    async def failing(_request: web.Request) -> web.Response:
        return web.Response(status=500, text="no room")

    async def test(endpoint: str) -> None:
        options = {"otlp_traces_endpoint": endpoint}
        async with (
            network([failing], [answering], **options) as net,
            net.chat(request(image("a"))) as response,
        ):
            assert response.status == 200
        async with network([], [failing], **options) as net, net.chat(request()) as response:
            assert response.status == 500

    with http_collector(spans) as endpoint:
        run(lambda: test(endpoint))

    marks = sorted((span.name, span.status.code) for span in spans)
    assert marks == [
        ("ec_proxy_decode", 0),
        ("ec_proxy_decode", 2),
        ("ec_proxy_encode", 2),
        ("ec_proxy_request", 0),
        ("ec_proxy_request", 2),
    ]
    (why,) = [span.status.message for span in spans if span.name == "ec_proxy_encode"]
    assert "no room" in why
    assert not any(span.events for span in spans)


def test_a_collector_that_is_away_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the router ends all the same."""
    pytest.importorskip("opentelemetry.sdk", reason="the otel extra is not installed")
    monkeypatch.setenv(PROTOCOL, HTTP)

    async def test() -> None:
        options = {"otlp_traces_endpoint": closed_port()}
        async with network([], [answering], **options) as net, net.chat(request()) as response:
            assert response.status == 200

    run(test)


def test_without_an_endpoint_the_clients_headers_pass() -> None:
    """And nothing of OpenTelemetry runs."""

    async def test() -> None:
        async with network([], [answering]) as net:
            async with net.chat(request(), headers=TRACED) as response:
                assert response.status == 200
            assert net.decoder.headers[0].getall("traceparent") == [TRACED["traceparent"]]

    assert type(spans_to("")) is Spans
    run(test)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROTOCOL, "carrier-pigeon")
    with pytest.raises(ConfigError, match=r"carrier-pigeon.*neither 'grpc' nor 'http/protobuf'"):
        spans_to("http://collector:4317")
    monkeypatch.setenv(PROTOCOL, GRPC)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    with pytest.raises(ConfigError, match=r"pip install 'ec-connector\[otel\]'"):
        spans_to("http://collector:4317")
