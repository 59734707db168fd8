# SPDX-License-Identifier: Apache-2.0
"""The worker half with real regions and tensors, and a recording connection to the agent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ec_connector.engine.step import Placement, StepMetadata
from ec_connector.pool.region import Region
from ec_connector.protocol.local import DropAll, Saved, SaveFailed, StepDone, ToAgent

torch = pytest.importorskip("torch", reason="the worker half moves torch tensors")

from ec_connector.engine._compat import RankFacts  # noqa: E402 - needs torch
from ec_connector.engine.device import HostDevice  # noqa: E402
from ec_connector.engine.worker import WorkerSide  # noqa: E402

ROWS, WIDTH = 4, 64
NBYTES = ROWS * WIDTH * 2
BLOCK = 256


class Recorder:
    """A connection that notes what is sent, over every connection made."""

    sent: list[tuple[str, ToAgent]]

    def __init__(self) -> None:
        self.sent = []
        self.made: list[str] = []
        self.endpoint = ""

    def connect(self, endpoint: str, role: str) -> Recorder:
        assert role == "worker"
        self.endpoint = endpoint
        self.made.append(endpoint)
        return self

    def send(self, message: ToAgent) -> bool:
        self.sent.append((self.endpoint, message))
        return True

    def receive(self, timeout: float = 0.0) -> list[Any]:
        return []

    def close(self) -> None:
        self.endpoint = ""

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.sent if isinstance(message, kind)]


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(16 * BLOCK, BLOCK)
    yield made
    made.close()


def worker(recorder: Recorder, *, producer: bool = True, leads: bool = True) -> WorkerSide:
    return WorkerSide(RankFacts(producer, leads, "bfloat16"), HostDevice(), recorder.connect)


def place(region: Region, key: str = "a", **change: Any) -> Placement:
    values: dict[str, Any] = {
        "key": key,
        "generation": 7,
        "extents": [(5, 1), (2, 1)],
        "nbytes": NBYTES,
        "dtype": "bfloat16",
        "shape": (ROWS, WIDTH),
        "token": region.ref.token,
    }
    return Placement(**values | change)


def orders(region: Region, number: int = 1, **change: Any) -> StepMetadata:
    return StepMetadata(number, "ipc://agent", [region.ref], **change)


def rows(seed: int = 0) -> Any:
    batch = torch.arange(3 * ROWS * WIDTH, dtype=torch.float32).reshape(3, ROWS, WIDTH) + seed
    return batch.to(torch.bfloat16)[1]  # a view into its batch's storage, as vLLM's are


def bytes_in(region: Region, at: Placement) -> bytes:
    return b"".join(region.views(at.extents, at.nbytes))


def raw(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def run(side: WorkerSide, cache: dict[str, Any], step: StepMetadata, *encoded: str) -> None:
    side.start_save(cache, step)
    side.start_load(cache, step)
    for key in encoded:
        side.save(cache, key, step)
    side.finish(step)


def test_a_save_writes_the_rows_and_reports_in_order(region: Region) -> None:
    """Rows that are a view into a batch arrive byte for byte over several extents."""
    recorder, cache = Recorder(), {"a": rows()}
    side = worker(recorder)
    order = place(region)
    run(side, cache, orders(region, saves={"a": order}, close_step=1), "a")
    assert bytes_in(region, order) == raw(rows())
    assert [type(message) for _, message in recorder.sent] == [Saved, StepDone]
    assert recorder.of(Saved)[0].items == [("a", 7)]
    assert recorder.of(StepDone)[0].step == 1


def test_rows_that_are_not_contiguous_are_saved_right(region: Region) -> None:
    """A column slice of a wider tensor is copied as what it shows."""
    wide = torch.arange(ROWS * WIDTH * 2, dtype=torch.float32).reshape(ROWS, 2 * WIDTH)
    sliced = wide.to(torch.bfloat16)[:, WIDTH:]
    order = place(region)
    run(worker(Recorder()), {"a": sliced}, orders(region, saves={"a": order}), "a")
    assert bytes_in(region, order) == raw(sliced)


def test_inference_tensors_are_saved(region: Region) -> None:
    """vLLM's encoder outputs are inference tensors."""
    with torch.inference_mode():
        output = rows() + 1
    order = place(region)
    run(worker(Recorder()), {"a": output}, orders(region, saves={"a": order}), "a")
    assert bytes_in(region, order) == raw(output)


@pytest.mark.parametrize(
    "output",
    [
        rows()[:3],
        rows()[:, :8],
        rows().float(),
        rows().reshape(-1),
    ],
)
def test_rows_that_do_not_fit_their_reservation_are_not_written(
    region: Region, output: Any
) -> None:
    """Wrong rows, width, dtype or rank: the agent is told, and the pool stays untouched."""
    recorder = Recorder()
    order = place(region)
    run(worker(recorder), {"a": output}, orders(region, saves={"a": order}, close_step=1), "a")
    assert bytes_in(region, order) == bytes(NBYTES)
    (failed,) = recorder.of(SaveFailed)
    assert (failed.key, failed.generation) == ("a", 7)
    assert "expected" in failed.message
    assert not recorder.of(Saved)


def test_an_exception_while_saving_reaches_the_agent_not_the_model(region: Region) -> None:
    """The traceback travels to whoever waits for the item."""
    recorder = Recorder()
    order = place(region, extents=[(99, 2)])
    run(worker(recorder), {"a": rows()}, orders(region, saves={"a": order}, close_step=1), "a")
    (failed,) = recorder.of(SaveFailed)
    assert "RegionError" in failed.message
    assert "Traceback" in failed.traceback
    assert recorder.of(StepDone)


def test_only_the_leading_producer_rank_saves(region: Region) -> None:
    """Other ranks, and consumers, connect to nobody and write nothing."""
    for kind in ({"leads": False}, {"producer": False}):
        recorder, order = Recorder(), place(region)
        run(
            worker(recorder, **kind),
            {"a": rows()},
            orders(region, saves={"a": order}, close_step=1),
            "a",
        )
        assert bytes_in(region, order) == bytes(NBYTES)
        assert recorder.made == []


def test_an_item_that_was_not_reported_but_is_there_is_saved(region: Region) -> None:
    """A runner that skips an encode does not call for the save; the step's end makes up for it."""
    recorder, cache = Recorder(), {"a": rows()}
    run(worker(recorder), cache, orders(region, saves={"a": place(region)}, close_step=1))
    assert len(recorder.of(Saved)) == 1


def test_an_item_that_was_never_encoded_is_left_to_the_agent(region: Region) -> None:
    """Its reservation ends with the step's word."""
    recorder = Recorder()
    run(worker(recorder), {}, orders(region, saves={"a": place(region)}, close_step=1))
    assert [type(message) for _, message in recorder.sent] == [StepDone]


def test_republishing_takes_what_the_cache_has(region: Region) -> None:
    """Lost items are saved before the model runs; those the worker lost, too, are not."""
    recorder, order = Recorder(), place(region)
    missing = place(region, "b", extents=[(8, 2)])
    step = orders(region, republish={"a": order, "b": missing}, close_step=1)
    side = worker(recorder)
    side.start_save({"a": rows()}, step)
    assert bytes_in(region, order) == raw(rows())
    assert [message.items for message in recorder.of(Saved)] == [[("a", 7)]]


def test_a_load_puts_the_very_rows_into_the_cache(region: Region) -> None:
    """What another engine saved is in the encoder cache with its shape and dtype."""
    order = place(region)
    run(worker(Recorder()), {"a": rows()}, orders(region, saves={"a": order}), "a")
    region.set_generation(5, 7)
    cache: dict[str, Any] = {}
    side = worker(Recorder(), producer=False)
    run(side, cache, orders(region, loads={"a": order}))
    assert cache["a"].dtype == torch.bfloat16
    assert tuple(cache["a"].shape) == (ROWS, WIDTH)
    assert torch.equal(cache["a"], rows())
    assert side.report() is None


def test_a_load_leaves_what_is_there(region: Region) -> None:
    """An order that is repeated does not replace a tensor in use."""
    region.set_generation(5, 7)
    kept = rows()
    cache = {"a": kept}
    run(worker(Recorder(), producer=False), cache, orders(region, loads={"a": place(region)}))
    assert cache["a"] is kept


def test_the_loaded_tensor_does_not_share_the_pools_memory(region: Region) -> None:
    """Blocks may be reused after the step; the model keeps its rows."""
    region.set_generation(5, 7)
    cache: dict[str, Any] = {}
    order = place(region)
    run(worker(Recorder(), producer=False), cache, orders(region, loads={"a": order}))
    region.views(order.extents, NBYTES)[0][:4] = b"\xff\xff\xff\xff"
    assert raw(cache["a"]) == bytes(NBYTES)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"generation": 8}, "generation"),
        ({"extents": [(99, 2)]}, "extent"),
        ({"token": "gone"}, "not mapped"),
    ],
)
def test_a_broken_promise_leaves_zeros_and_is_reported(
    region: Region, change: dict[str, Any], words: str
) -> None:
    """Torn, impossible or unmapped: the engine lives, and the scheduler fails the request."""
    region.set_generation(5, 7)
    region.views([(5, 1)], 4)[0][:] = b"\x01\x02\x03\x04"
    cache: dict[str, Any] = {}
    side = worker(Recorder(), producer=False)
    run(side, cache, orders(region, loads={"a": place(region, **change)}))
    assert torch.equal(cache["a"], torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16))
    report = side.report()
    assert report is not None
    assert words in report.failed_loads["a"]
    assert side.report() is None


def test_zeros_are_replaced_when_the_item_comes_again(region: Region) -> None:
    """A later order for the same item overwrites the stand-in."""
    cache: dict[str, Any] = {}
    side = worker(Recorder(), producer=False)
    run(side, cache, orders(region, 1, loads={"a": place(region)}))
    region.set_generation(5, 7)
    region.views([(5, 1)], 2)[0][:] = b"\x80\x3f"  # 1.0
    run(side, cache, orders(region, 2, loads={"a": place(region)}))
    assert cache["a"][0, 0] == 1


def test_zeros_are_never_published(region: Region) -> None:
    """A stand-in must not reach the pool, where others would take it for the item."""
    recorder, cache = Recorder(), dict[str, Any]()
    side = worker(recorder)
    run(side, cache, orders(region, 1, loads={"a": place(region)}))
    run(side, cache, orders(region, 2, republish={"a": place(region)}))
    assert not recorder.of(Saved)


def test_an_emptied_cache_is_noticed_and_the_pool_told(region: Region) -> None:
    """Items that vanish without the scheduler's word mean new weights."""
    recorder, cache = Recorder(), {"a": rows(), "b": rows()}
    side = worker(recorder)
    run(side, cache, orders(region, 1))
    cache.clear()
    run(side, cache, orders(region, 2))
    assert recorder.of(DropAll)
    report = side.report()
    assert report is not None
    assert report.resets == 1
    run(side, cache, orders(region, 3))
    assert len(recorder.of(DropAll)) == 1


def test_loads_chosen_before_a_reset_was_known_are_not_trusted(region: Region) -> None:
    """The pool's rows may be of other weights: zeros and a word instead, until it is known."""
    recorder, cache = Recorder(), {"a": rows()}
    side = worker(recorder)
    region.set_generation(5, 7)
    run(side, cache, orders(region, 1))
    cache.clear()
    run(side, cache, orders(region, 2, loads={"b": place(region, "b")}))
    report = side.report()
    assert report is not None
    assert list(report.failed_loads) == ["b"]
    assert not cache["b"].any()
    run(side, cache, orders(region, 3, loads={"c": place(region, "c")}))
    report = side.report()
    assert report is not None
    assert (list(report.failed_loads), report.resets) == (["c"], 1)
    run(side, cache, orders(region, 4, loads={"d": place(region, "d")}, resets=1))
    assert side.report() is None
    assert len(recorder.of(DropAll)) == 1


def test_a_reset_that_the_scheduler_knows_is_left_to_it(region: Region) -> None:
    """It dropped the pool before it asked anew, so what it orders loaded is of now."""
    recorder, cache = Recorder(), {"a": rows()}
    side = worker(recorder)
    region.set_generation(5, 7)
    run(side, cache, orders(region, 1))
    cache.clear()
    run(side, cache, orders(region, 2, loads={"b": place(region, "b")}, resets=1))
    assert side.report() is None
    assert not recorder.of(DropAll)


def test_a_reset_that_nothing_showed_is_counted_all_the_same(region: Region) -> None:
    """The cache was empty when it was emptied; the next time is news even so."""
    cache: dict[str, Any] = {}
    side = worker(Recorder())
    run(side, cache, orders(region, 1, resets=1))
    cache["a"] = rows()
    run(side, cache, orders(region, 2, resets=1))
    cache.clear()
    run(side, cache, orders(region, 3, resets=1))
    report = side.report()
    assert report is not None
    assert report.resets == 2


def test_evictions_are_no_reset(region: Region) -> None:
    """Items that the scheduler freed may go; a repeated word about them does no harm."""
    recorder, cache = Recorder(), {"a": rows(), "b": rows()}
    side = worker(recorder)
    run(side, cache, orders(region, 1))
    del cache["a"]
    run(side, cache, orders(region, 2, freed=["a"]))
    run(side, cache, orders(region, 3, freed=["a"]))
    assert not recorder.of(DropAll)
    assert side.report() is None


def test_a_restarted_agent_gets_a_new_connection(region: Region) -> None:
    """Words go to the endpoint that the step names."""
    recorder = Recorder()
    side = worker(recorder)
    for number, endpoint in ((1, "ipc://one"), (2, "ipc://one"), (3, "ipc://two")):
        step = StepMetadata(number, endpoint, [region.ref], close_step=number)
        run(side, {}, step)
    assert recorder.made == ["ipc://one", "ipc://two"]
    assert [endpoint for endpoint, _ in recorder.sent] == ["ipc://one", "ipc://one", "ipc://two"]


def test_old_regions_stay_mapped_for_a_while_then_go() -> None:
    """After a restart the last region still serves; the ones before it are let go."""
    opened: list[Region] = []

    def open_and_note(*args: Any, **kwargs: Any) -> Region:
        opened.append(Region.open(*args, **kwargs))
        return opened[-1]

    regions = [Region.create(BLOCK, BLOCK) for _ in range(4)]
    side = WorkerSide(
        RankFacts(False, True, "bfloat16"), HostDevice(), Recorder().connect, open_and_note
    )
    for number, region in enumerate(regions):
        run(side, {}, StepMetadata(number + 1, "ipc://agent", [region.ref]))
    assert [bool(region.views([(0, 1)], 1)) for region in opened[2:]] == [True, True]
    for region in opened[:2]:
        with pytest.raises(Exception, match="closed"):
            region.views([(0, 1)], 1)
    side.close()
    for region in regions:
        region.close()
