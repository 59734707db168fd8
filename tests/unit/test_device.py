# SPDX-License-Identifier: Apache-2.0
"""Copies beside the computation, in the order that makes them safe. No device is needed.

``FakeCuda`` stands in for ``torch.cuda``: it records what is called and lets a
test decide when an event fires. Its copies happen at once, in host memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ec_connector.pool.region import Region

torch = pytest.importorskip("torch", reason="rows are torch tensors")

from ec_connector.engine.device import HostDevice, StreamDevice, device_for  # noqa: E402 - needs torch


class FakeCuda:
    """The part of ``torch.cuda`` that is used, recorded by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fire = threading.Event()
        self.status = 0
        self.streams = 0

    def Stream(self, device: str) -> Any:
        self.streams += 1
        return _Stream(self, "save" if self.streams == 1 else "load")

    def Event(self) -> Any:
        return _Event(self)

    def current_stream(self, _device: str) -> Any:
        return _Stream(self, "compute")

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(f"enter {stream.name}")
        yield
        self.calls.append(f"leave {stream.name}")

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, _address: int, nbytes: int, flags: int) -> int:
        self.calls.append(f"register {nbytes} {flags}")
        return self.status

    def cudaHostUnregister(self, _address: int) -> int:
        self.calls.append("unregister")
        return 0


class _Stream:
    def __init__(self, api: FakeCuda, name: str) -> None:
        self.api, self.name = api, name

    def wait_stream(self, other: Any) -> None:
        self.api.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Any) -> None:
        self.api.calls.append(f"{self.name} waits for event of {event.stream}")

    def synchronize(self) -> None:
        self.api.calls.append(f"host waits for {self.name}")


class _Event:
    def __init__(self, api: FakeCuda) -> None:
        self.api, self.stream = api, ""

    def record(self, stream: Any) -> None:
        self.stream = stream.name
        self.api.calls.append(f"event in {stream.name}")

    def synchronize(self) -> None:
        if self.stream == "save":
            assert self.api.fire.wait(10)
        self.api.calls.append(f"host waits for event of {self.stream}")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    def note(_tensor: Any, stream: Any) -> None:
        fake.calls.append(f"rows kept for {stream.name}")

    monkeypatch.setattr(torch.Tensor, "record_stream", note)
    return fake


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(64 * 1024, 4096)
    yield made
    made.close()


def streams(api: FakeCuda) -> StreamDevice:
    return StreamDevice("cpu", api)


def test_a_save_waits_for_the_computation_and_nobody_waits_for_it(
    api: FakeCuda, region: Region
) -> None:
    """The copy is queued behind what made the rows; its word goes out when the event fires."""
    device, told = streams(api), threading.Event()
    rows = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    device.save(rows, region.views([(0, 1)], 32))
    device.later(told.set, lambda error: pytest.fail(str(error)))
    assert api.calls[:5] == [
        "save waits for compute",
        "enter save",
        "leave save",
        "rows kept for save",
        "event in save",
    ]
    assert not told.is_set()
    api.fire.set()
    assert told.wait(10)
    assert bytes(region.views([(0, 1)], 32)[0]) == rows.numpy().tobytes()
    device.close()


def test_actions_keep_their_order_on_one_thread(api: FakeCuda, region: Region) -> None:
    """Saved comes before the step's last word, and one thread owns the connection."""
    device = streams(api)
    order: list[tuple[str, int]] = []
    for name in ("saved", "step done"):
        device.save(torch.zeros(1, 4), region.views([(0, 1)], 16))
        device.later(
            lambda name=name: order.append((name, threading.get_ident())),  # type: ignore[misc]
            lambda error: pytest.fail(str(error)),
        )
    api.fire.set()
    device.close()
    assert [name for name, _ in order] == ["saved", "step done"]
    assert len({thread for _, thread in order}) == 1
    assert order[0][1] != threading.get_ident()


def test_a_device_error_is_reported_not_raised(api: FakeCuda) -> None:
    """A failed copy ends in the caller's own handler, and the thread goes on."""
    device, errors, told = streams(api), list[BaseException](), threading.Event()

    def broken() -> None:
        raise RuntimeError("device lost")

    api.fire.set()
    device.later(broken, errors.append)
    device.later(told.set, errors.append)
    assert told.wait(10)
    device.close()
    assert [str(error) for error in errors] == ["device lost"]


def test_a_load_is_waited_for_by_the_computation_on_the_device(
    api: FakeCuda, region: Region
) -> None:
    """Rows come on a side stream; what is computed next waits there, the host at the step's end."""
    source = torch.arange(8, dtype=torch.float32)
    region.views([(2, 1)], 32)[0][:] = source.numpy().tobytes()
    device = streams(api)
    rows = device.load(region.views([(2, 1)], 32), (2, 4), torch.float32)
    assert torch.equal(rows, source.reshape(2, 4))
    assert api.calls == [
        "enter load",
        "event in load",
        "leave load",
        "compute waits for event of load",
        "rows kept for compute",
    ]
    device.finish_step()
    assert api.calls[-1] == "host waits for event of load"
    before = len(api.calls)
    device.finish_step()
    assert len(api.calls) == before
    api.fire.set()
    device.close()


def test_regions_are_registered_and_released(api: FakeCuda, region: Region) -> None:
    """The whole region is pinned once; before it goes the streams are drained."""
    device = streams(api)
    device.open(region)
    device.forget(region)
    assert api.calls == [
        f"register {region.ref.nbytes} 0",
        "host waits for save",
        "host waits for load",
        "unregister",
    ]
    api.fire.set()
    device.close()


def test_without_pinned_memory_copies_still_work(
    api: FakeCuda, region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    """A driver that refuses costs speed and a line in the log, nothing else."""
    api.status = 2
    device = streams(api)
    device.open(region)
    assert "memlock" in caplog.text
    device.forget(region)
    assert "unregister" not in api.calls
    api.fire.set()
    device.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_host_copies_keep_every_byte(region: Region, dtype: str) -> None:
    """Saved and loaded rows are equal bit for bit, over several pieces."""
    kind = getattr(torch, dtype)
    raw = torch.randint(0, 255, (3, 4096), dtype=torch.uint8, generator=torch.manual_seed(1))
    rows = raw.view(kind)
    nbytes = raw.numel()
    extents = [(3, 1), (0, 2)]
    device = HostDevice()
    device.save(rows, region.views(extents, nbytes))
    again = device.load(region.views(extents, nbytes), rows.shape, kind)
    assert torch.equal(again.view(torch.uint8), raw)


def test_an_item_without_rows_is_copied(region: Region) -> None:
    """Nothing is nothing, on both ways."""
    device = HostDevice()
    device.save(torch.zeros(0, 4), [])
    assert device.load([], (0, 4), torch.float32).shape == (0, 4)


def test_the_way_is_chosen_by_the_device() -> None:
    """Host memory, and devices without CUDA's streams, are copied at once."""
    assert isinstance(device_for("cpu", contextlib.nullcontext), HostDevice)
    assert isinstance(device_for("xpu", contextlib.nullcontext), HostDevice)
