# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of requests, and of what each of them asks of a server.

The option and the way to the collector are vLLM's own (``--otlp-traces-endpoint``; gRPC unless
``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`` is ``http/protobuf``), so that the router's spans and the
engines' stand in one trace. Without an endpoint nothing of OpenTelemetry is imported, and a
client's ``traceparent`` passes as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

from ec_connector.errors import ConfigError
from ec_connector.proxy.headers import RawHeaders
from ec_connector.proxy.instances import Target
from ec_connector.proxy.intake import Answering

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

GRPC: Final = "grpc"
HTTP: Final = "http/protobuf"
PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
EXPORT_SECONDS: Final = 2
"""To hand spans over. The router's end waits no longer for a collector that is away."""
SERVICE: Final = "ec-connector-proxy"

Pairs = list[tuple[str, str]]


class Spans:
    """No spans: what a router without a collector uses."""

    def request(
        self,
        path: str,  # noqa: ARG002 - of the interface
        headers: RawHeaders,  # noqa: ARG002 - the same
        answer: Answering,  # noqa: ARG002 - the same
    ) -> AbstractContextManager[None]:
        """Around the answering of one client's request; ``headers`` with its request id."""
        return nullcontext()

    def hop(
        self,
        target: Target,  # noqa: ARG002 - the same
        path: str,  # noqa: ARG002 - the same
        headers: Pairs,
    ) -> AbstractContextManager[Pairs]:
        """Around one request to a server; gives the headers to send with it."""
        return nullcontext(headers)

    def close(self) -> None:
        """Send what is left. Blocks for ``EXPORT_SECONDS`` at most, or little longer."""


class ExportedSpans(Spans):
    """Spans that go to a collector, in the background and in a bounded queue.

    ``ec_proxy_request`` (server) with one ``ec_proxy_encode``, ``ec_proxy_prefill`` or
    ``ec_proxy_decode`` (client) for each request to a server. Attributes have the names that
    OpenTelemetry and vLLM use. Sampling follows ``OTEL_TRACES_SAMPLER``.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = Resource({SERVICE_NAME: SERVICE}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=named, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ec_connector.proxy")
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._client = trace.SpanKind.SERVER, trace.SpanKind.CLIENT
        self._failed = trace.StatusCode.ERROR

    @contextmanager
    def request(self, path: str, headers: RawHeaders, answer: Answering) -> Iterator[None]:
        carried = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        with self._tracer.start_as_current_span(
            "ec_proxy_request",
            context=self._propagator.extract(carried),
            kind=self._server,
            attributes={"url.path": path, "gen_ai.request.id": carried["x-request-id"]},
            record_exception=False,
        ) as span:
            yield
            if not answer.status:
                span.set_attribute("error.type", "client_gone")
                return
            span.set_attribute("http.response.status_code", answer.status)
            span.set_attribute("gen_ai.latency.time_to_first_token", answer.first_byte)
            if answer.status >= 500:
                span.set_status(self._failed)

    @contextmanager
    def hop(self, target: Target, path: str, headers: Pairs) -> Iterator[Pairs]:
        with self._tracer.start_as_current_span(
            f"ec_proxy_{target.instance.role}",
            kind=self._client,
            attributes={"server.address": target.name, "url.path": path.partition("?")[0]},
            record_exception=False,  # its message is the status; a stack says nothing here
        ):
            carrier: dict[str, str] = {}
            self._propagator.inject(carrier)
            others = [pair for pair in headers if pair[0] not in self._propagator.fields]
            yield [*others, *carrier.items()]

    def close(self) -> None:
        self._provider.shutdown()


def spans_to(endpoint: str) -> Spans:
    """Spans for the collector at ``endpoint``; none if that is empty.

    Raises:
        ConfigError: a library is missing, or the environment names a protocol that is none.
    """
    if not endpoint:
        return Spans()
    protocol = os.environ.get(PROTOCOL) or GRPC
    try:
        return ExportedSpans(_exporter(protocol, endpoint))
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: {error}; pip install 'ec-connector[otel]'"
        ) from error


def _exporter(protocol: str, endpoint: str) -> SpanExporter:
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

        plain = not endpoint.startswith("https://")  # vLLM takes host:port as well
        return over_grpc.OTLPSpanExporter(endpoint, insecure=plain, timeout=EXPORT_SECONDS)
    if protocol == HTTP:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

        return over_http.OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)
    raise ConfigError(f"{PROTOCOL}={protocol!r} is neither {GRPC!r} nor {HTTP!r}")
