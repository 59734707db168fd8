# SPDX-License-Identifier: Apache-2.0
"""Moves rows between the pool's memory and the device that the model runs on.

One seam, :class:`Device`, and two ways: :class:`HostDevice` copies at once,
:class:`StreamDevice` queues copies beside the computation and lets a thread
wait for them. torch's device API comes in as an argument, so the order of
operations can be tested without a device.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from ec_connector.pool.region import Region

logger = logging.getLogger("vllm.ec_connector.device")

Action = Callable[[], None]
OnError = Callable[[BaseException], None]
_CLOSE_SECONDS: Final = 10.0


class Device(Protocol):
    """Copies of whole items. Only :meth:`later`'s actions may run on another thread.

    ``pins``: regions must be mapped writable, for the driver to register them.
    ``deferred``: a load may still be under way until :meth:`finish_step`.
    """

    pins: bool
    deferred: bool

    def open(self, region: Region) -> None:
        """A region was mapped: prepare it for copies."""

    def forget(self, region: Region) -> None:
        """The region is about to be unmapped."""

    def load(
        self, pieces: Sequence[memoryview], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows of the pool as a new tensor, usable by what is computed next."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to stand in for rows that could not be had."""

    def save(self, rows: torch.Tensor, pieces: Sequence[memoryview]) -> None:
        """Copy contiguous rows into the pool; the tensor may be let go at once."""

    def later(self, action: Action, failed: OnError) -> None:
        """Run ``action`` when every save so far is done, ``failed`` if one was not.

        Actions run one after another, all on the same thread.
        """

    def finish_step(self) -> None:
        """Wait until every load of this step is done."""

    def close(self) -> None:
        """Wait, for a bounded time, for what is under way."""


class HostDevice:
    """Copies at once: tensors in host memory, or on a device without streams of torch's kind.

    Args:
        device: torch's name of it.
        waiting_allowed: a context for calls in which the host waits for the device.
    """

    pins = False
    deferred = False

    def __init__(
        self,
        device: str = "cpu",
        waiting_allowed: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        self._device = device
        self._waiting_allowed = waiting_allowed

    def open(self, region: Region) -> None:
        """Nothing to prepare."""

    def forget(self, region: Region) -> None:
        """Nothing to undo."""

    def load(
        self, pieces: Sequence[memoryview], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """See :class:`Device`."""
        rows = torch.empty(tuple(shape), dtype=dtype)
        target = rows.view(-1).view(torch.uint8).numpy()
        offset = 0
        for piece in pieces:
            target[offset : offset + len(piece)] = np.frombuffer(piece, np.uint8)
            offset += len(piece)
        if self._device == "cpu":
            return rows
        with self._waiting_allowed():
            return rows.to(self._device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Device`."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def save(self, rows: torch.Tensor, pieces: Sequence[memoryview]) -> None:
        """See :class:`Device`."""
        with self._waiting_allowed():
            rows = rows.detach().to("cpu").contiguous()
        source = rows.view(-1).view(torch.uint8).numpy()
        offset = 0
        for piece in pieces:
            np.frombuffer(piece, np.uint8)[:] = source[offset : offset + len(piece)]
            offset += len(piece)

    def later(self, action: Action, failed: OnError) -> None:
        """Every save is done already."""
        try:
            action()
        except Exception as error:
            failed(error)

    def finish_step(self) -> None:
        """Every load is done already."""

    def close(self) -> None:
        """Nothing is under way."""


class StreamDevice:
    """Copies on a side stream; the pool's memory is registered with the driver.

    The computation is never waited for, nor does it wait for a save: rows are
    kept alive until they are copied, so the encoder cache may drop them at once.
    A load is waited for by the computation that follows it, on the device.

    Args:
        device: torch's name of it, such as ``"cuda:0"``.
        api: ``torch.cuda``, or what has its ``Stream``, ``Event``, ``stream``,
            ``current_stream`` and ``cudart``.
    """

    pins = True
    deferred = True

    def __init__(self, device: str, api: Any = torch.cuda) -> None:
        self._device = device
        self._api = api
        self._saving = api.Stream(device=device)
        self._loading = api.Stream(device=device)
        self._loads: list[tuple[Any, list[Any]]] = []
        self._unwatched: list[Any] = []
        self._registered: set[str] = set()
        self._work: queue.SimpleQueue[tuple[Any, list[Any], Action, OnError] | None]
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="ec-saver", daemon=True)
        self._thread.start()

    def open(self, region: Region) -> None:
        """Register the region's memory; without it copies still work, but slower."""
        data = np.frombuffer(region.buffer, np.uint8)
        status = self._api.cudart().cudaHostRegister(data.ctypes.data, data.nbytes, 0)
        if int(status) == 0:
            self._registered.add(region.ref.token)
        else:
            logger.warning(
                "The driver does not take the pool's %d bytes as pinned memory (error %d), so "
                "copies are slower; raise the memlock limit of this process",
                data.nbytes,
                int(status),
            )

    def forget(self, region: Region) -> None:
        """Unregister the region's memory, once no copy of ours uses it."""
        if region.ref.token in self._registered:
            self._registered.discard(region.ref.token)
            self._saving.synchronize()
            self._loading.synchronize()
            data = np.frombuffer(region.buffer, np.uint8)
            self._api.cudart().cudaHostUnregister(data.ctypes.data)

    def load(
        self, pieces: Sequence[memoryview], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """See :class:`Device`."""
        computing = self._api.current_stream(self._device)
        sources = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces]
        with self._api.stream(self._loading):
            rows = torch.empty(tuple(shape), dtype=dtype, device=self._device)
            target = rows.view(-1).view(torch.uint8)
            offset = 0
            for source in sources:
                target[offset : offset + len(source)].copy_(source, non_blocking=True)
                offset += len(source)
            done = self._api.Event()
            done.record(self._loading)
        computing.wait_event(done)
        # Made on the side stream, used on the other: its memory must not be reused under it.
        rows.record_stream(computing)
        self._loads.append((done, sources))
        return rows

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Device`."""
        return torch.zeros(tuple(shape), dtype=dtype, device=self._device)

    def save(self, rows: torch.Tensor, pieces: Sequence[memoryview]) -> None:
        """See :class:`Device`."""
        rows = rows.detach().contiguous()
        source = rows.view(-1).view(torch.uint8)
        targets = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces]
        self._saving.wait_stream(self._api.current_stream(self._device))
        with self._api.stream(self._saving):
            offset = 0
            for target in targets:
                target.copy_(source[offset : offset + len(target)], non_blocking=True)
                offset += len(target)
        rows.record_stream(self._saving)
        self._unwatched += [rows, *targets]

    def later(self, action: Action, failed: OnError) -> None:
        """See :class:`Device`."""
        done = self._api.Event()
        done.record(self._saving)
        keep, self._unwatched = self._unwatched, []
        self._work.put((done, keep, action, failed))

    def finish_step(self) -> None:
        """See :class:`Device`."""
        for done, _ in self._loads:
            done.synchronize()
        self._loads.clear()

    def close(self) -> None:
        """See :class:`Device`."""
        self._work.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        while (work := self._work.get()) is not None:
            done, keep, action, failed = work
            try:
                done.synchronize()
                action()
            except Exception as error:
                failed(error)
            # The next one may be long in coming, and these rows may be much memory.
            del work, keep, action, failed


def device_for(name: str, waiting_allowed: Callable[[], Any]) -> Device:
    """The way to copy for torch's device of this name."""
    if name.startswith("cuda"):
        return StreamDevice(name)
    return HostDevice(name, waiting_allowed)
