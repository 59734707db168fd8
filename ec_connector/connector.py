# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads. It only forwards: to the scheduler's half, or to the worker's."""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)

from ec_connector.engine._compat import require_hooks
from ec_connector.engine.metrics import PoolPromMetrics, PoolStats
from ec_connector.engine.scheduler import SchedulerSide
from ec_connector.engine.step import StepMetadata, WorkerReport
from ec_connector.engine.worker import WorkerSide
from ec_connector.errors import InternalError

# Both stay plain data that knows nothing of vLLM; vLLM only asks what they are.
ECConnectorMetadata.register(StepMetadata)
ECConnectorWorkerMetadata.register(WorkerReport)


class ECPoolConnector(ECConnectorBase):
    """Moves encoder outputs from producers to consumers through an agent's pool.

    Raises:
        ConfigError: a setting is wrong; the text says what to do.
        AgentStartError: the agent did not come up; the text holds its words.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        require_hooks(ECConnectorBase)
        self._as_scheduler: SchedulerSide | None = None
        self._as_worker: WorkerSide | None = None
        if role == ECConnectorRole.SCHEDULER:
            self._as_scheduler = SchedulerSide.of(vllm_config)
        else:
            self._as_worker = WorkerSide.of(vllm_config)

    # ── scheduler ────────────────────────────────────────────────────────────

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether every item the request still needs is here, or will be encoded here."""
        return self._scheduler.ensure(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the request just looked at can load this item instead of encoding it."""
        return self._scheduler.has_item(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """An item of a request is about to be loaded or encoded."""
        self._scheduler.allocated(request, index)

    def update_state_after_free(self, request: Any, index: int) -> None:
        """Nothing ends here: a preempted request needs its items again."""

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """The step's orders to the workers."""
        return self._scheduler.build(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers found."""
        report = connector_output.ec_connector_worker_meta
        if report is not None:
            self._scheduler.worker_report(report)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Never delays freeing: without a KV connector the request would stay for ever."""
        return False, self._scheduler.finished(request)

    def take_unavailable_requests(self) -> set[str]:
        """Requests whose items cannot be had and came without their media."""
        return self._scheduler.take_unavailable()

    def has_pending_push_work(self) -> bool:
        """No: the agent serves while the engine sleeps."""
        return False

    # ── worker ───────────────────────────────────────────────────────────────

    def register_caches(self, ec_caches: dict[str, Any]) -> None:
        """Nothing to register: the encoder cache comes with every step."""

    def start_worker_services(self) -> None:
        """Nothing to start: the agent serves, and the scheduler's half starts it."""

    def start_save_caches(self, **kwargs: Any) -> None:
        """Before the model runs, on producers."""
        self._worker.start_save(kwargs["encoder_cache"], self._step)

    def start_load_caches(self, encoder_cache: dict[str, Any], **_kwargs: Any) -> None:
        """Before the model runs, on consumers."""
        self._worker.start_load(encoder_cache, self._step)

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **_kwargs: Any) -> None:
        """After an item was encoded, also on consumers."""
        self._worker.save(encoder_cache, mm_hash, self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:  # noqa: ARG002
        """At the end of a step; no request is ever held back."""
        if self._as_worker is not None:
            self._as_worker.finish(self._step)
        return None, None

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What the scheduler must know of the step."""
        return self._as_worker.report() if self._as_worker is not None else None

    # ── both ─────────────────────────────────────────────────────────────────

    def get_ec_connector_stats(self) -> PoolStats | None:
        """The scheduler's half counts; V1 workers have no way to report."""
        data = self._as_scheduler.stats() if self._as_scheduler is not None else None
        return PoolStats(data) if data is not None else None

    def shutdown(self) -> None:
        """End the agent, finish copies. Not relied on: an engine may be killed."""
        if self._as_scheduler is not None:
            self._as_scheduler.close()
        if self._as_worker is not None:
            self._as_worker.close()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats:
        """The stats object for data that crossed processes."""
        return PoolStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolPromMetrics:
        """The Prometheus metrics of this connector."""
        return PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ── inside ───────────────────────────────────────────────────────────────

    @property
    def _scheduler(self) -> SchedulerSide:
        if self._as_scheduler is None:
            raise InternalError("a scheduler's hook was called on a worker's connector")
        return self._as_scheduler

    @property
    def _worker(self) -> WorkerSide:
        if self._as_worker is None:
            raise InternalError("a worker's hook was called on a scheduler's connector")
        return self._as_worker

    @property
    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise InternalError(f"{type(metadata).__name__} is not this connector's metadata")
        return metadata
