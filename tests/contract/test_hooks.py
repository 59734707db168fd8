# SPDX-License-Identifier: Apache-2.0
"""The connector against the base class and the configuration of the vLLM that is installed."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.contract,
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports are not ours to judge
]
base = pytest.importorskip(
    "vllm.distributed.ec_transfer.ec_connector.base", reason="compares with the installed vLLM"
)

from ec_connector.connector import ECPoolConnector  # noqa: E402
from ec_connector.engine._compat import (  # noqa: E402 - needs vLLM
    NEEDED_HOOKS,
    ItemFields,
    engine_facts,
    require_hooks,
    watch_resets,
    watch_weights,
)
from ec_connector.engine.step import StepMetadata, WorkerReport  # noqa: E402
from ec_connector.engine.weights import may_change  # noqa: E402
from ec_connector.errors import ConfigError  # noqa: E402
from ec_connector.protocol.fingerprint import Identity, agree  # noqa: E402

LEFT_TO_VLLM = {
    "role": "set by the base class",
    "is_producer": "read by the base class from the role",
    "is_consumer": "read by the base class from the role",
    "bind_connector_metadata": "keeps the step's metadata",
    "clear_connector_metadata": "forgets the step's metadata",
}
"""Public members of the base class that are deliberately not overridden, and why."""


def test_every_hook_is_overridden_or_left_on_purpose() -> None:
    """A hook that vLLM adds has a silent default; this says so instead."""
    hooks = {name for name in vars(base.ECConnectorBase) if not name.startswith("_")}
    overridden = set(vars(ECPoolConnector))
    assert hooks - overridden == set(LEFT_TO_VLLM)
    assert not overridden & set(LEFT_TO_VLLM)


def test_signatures_take_what_vllm_passes() -> None:
    """Each override accepts the base class's parameters by name."""
    for name, ours in vars(ECPoolConnector).items():
        theirs = vars(base.ECConnectorBase).get(name)
        if name.startswith("_") or theirs is None or isinstance(theirs, property):
            continue
        wanted = inspect.signature(getattr(base.ECConnectorBase, name)).parameters
        taken = inspect.signature(getattr(ECPoolConnector, name)).parameters
        swallows = {parameter.kind for parameter in taken.values()}
        for parameter in wanted.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                assert parameter.VAR_KEYWORD in swallows, name
            else:
                assert parameter.name in taken, f"{name} does not take {parameter.name}"
        assert isinstance(ours, (classmethod, property)) == isinstance(
            theirs, (classmethod, property)
        )


def test_the_plain_structures_pass_for_vllms() -> None:
    """Metadata and report count as subclasses of vLLM's abstract ones."""
    assert isinstance(StepMetadata(1), base.ECConnectorMetadata)
    assert isinstance(WorkerReport(), base.ECConnectorWorkerMetadata)


def test_a_vllm_without_the_hooks_is_refused() -> None:
    """The message names what is missing and what to install."""
    old = type("Old", (), dict.fromkeys(NEEDED_HOOKS[:-1]))
    require_hooks(base.ECConnectorBase)
    with pytest.raises(ConfigError, match=rf"{NEEDED_HOOKS[-1]}.*vllm>=0\.32"):
        require_hooks(old)


# ── facts of a real configuration ────────────────────────────────────────────


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from ec_connector.demo.models import make_llava, make_qwen2_vl

    folder = tmp_path_factory.mktemp("models")
    return {
        "llava": make_llava(folder / "a" / "llava"),
        "other weights": make_llava(folder / "b" / "llava", seed=1),
        "qwen": make_qwen2_vl(folder / "qwen"),
    }


def config(model: Path, role: str = "ec_consumer", **options: Any) -> Any:
    from vllm.config import ECTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = {
        "ec_connector": "ECPoolConnector",
        "ec_role": role,
        "ec_connector_module_path": "ec_connector",
        **options.pop("transfer", {}),
    }
    return EngineArgs(
        model=str(model),
        dtype=options.pop("dtype", "bfloat16"),
        max_model_len=512,
        enforce_eager=True,
        ec_transfer_config=ECTransferConfig(**transfer),
        **options,
    ).create_engine_config()


def test_both_sides_of_a_pair_agree(models: dict[str, Path]) -> None:
    """A producer and a consumer with other lengths and caches have one identity."""
    producer = engine_facts(config(models["llava"], "ec_producer"))
    consumer = engine_facts(config(models["llava"], enable_prefix_caching=True, max_num_seqs=7))
    assert producer.identity == consumer.identity
    assert producer.always_delivers
    assert not consumer.always_delivers
    assert consumer.dtype == "bfloat16"
    assert consumer.possible_widths == {256}


def test_what_changes_the_bytes_is_a_factor(models: dict[str, Path]) -> None:
    """Weights behind an equal name, dtype and processor options each differ by name."""
    from ec_connector.protocol.fingerprint import first_difference

    mine = engine_facts(config(models["llava"])).identity

    def factor(other: Any) -> str:
        found = first_difference(mine.factors, engine_facts(other).identity.factors)
        assert found is not None
        return found[0]

    assert factor(config(models["llava"], dtype="float32")) == "dtype"
    assert factor(config(models["llava"], mm_processor_kwargs={"a": 1})) == "mm_processor_kwargs"
    moved = engine_facts(config(models["other weights"])).identity.factors
    assert moved["weights"] != mine.factors["weights"]


def test_the_hash_is_vllms_own(models: dict[str, Path]) -> None:
    """The compatibility hash is what the in-tree connector computes for this configuration."""
    from vllm.distributed.ec_transfer.ec_connector.cpu.protocol import (
        compute_ec_compatibility_hash,
    )
    from vllm.version import __version__

    found = config(models["llava"])
    expected = compute_ec_compatibility_hash(
        vllm_version=__version__,
        model=str(found.model_config.model),
        dtype="torch.bfloat16",
        block_size_bytes=256 * 2,
    )
    assert engine_facts(found).identity.compatibility_hash == expected


def test_ports(models: dict[str, Path]) -> None:
    """A port that was set is used, plus the data-parallel index; a consumer needs none."""
    port = {"transfer": {"ec_port": 7000}}
    producer = config(models["llava"], "ec_producer", **port)
    assert engine_facts(producer).settings.port == 7000
    producer.parallel_config.data_parallel_index = 2
    assert engine_facts(producer).settings.port == 7002
    producer.ec_transfer_config.ec_connector_extra_config = {"port": 8000}
    with pytest.raises(ConfigError, match=r"7000.*8000"):
        engine_facts(producer)
    producer.ec_transfer_config.ec_port = 14579
    assert engine_facts(producer).settings.port == 8002
    assert engine_facts(config(models["llava"], "ec_producer")).settings.port == 0
    assert engine_facts(config(models["llava"], "ec_consumer", **port)).settings.port == 0
    assert engine_facts(config(models["llava"])).settings.bind_host == "127.0.0.1"


def test_what_cannot_work_is_refused_at_the_start(models: dict[str, Path]) -> None:
    """Ranks on other nodes, adapters of the encoder and unknown keys name themselves."""
    found = config(models["llava"])
    found.lora_config = SimpleNamespace(enable_tower_connector_lora=True)
    with pytest.raises(ConfigError, match="enable_tower_connector_lora"):
        engine_facts(found)
    found.lora_config = None
    found.ec_transfer_config.ec_connector_extra_config = {"pool_sise": "1GiB"}
    with pytest.raises(ConfigError, match="pool_size"):
        engine_facts(found)
    found.ec_transfer_config.ec_connector_extra_config = {}
    found.parallel_config = SimpleNamespace(nnodes_within_dp=2, data_parallel_index=0)
    with pytest.raises(ConfigError, match="2 nodes"):
        engine_facts(found)


def test_unhashed_media_warns_at_the_start(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both caches off means identifiers that say nothing: the operator is told which flag."""
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    engine_facts(config(models["llava"], "ec_producer", mm_processor_cache_gb=0))
    assert "mm_processor_cache_gb" in caplog.text


def test_media_is_told_from_its_description(models: dict[str, Path]) -> None:
    """Pixels count as media, a grid alone does not; a model without such fields has media only."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalSharedField,
    )

    def feature(**data: Any) -> Any:
        item = MultiModalKwargsItem(
            {
                key: MultiModalFieldElem(data=value, field=MultiModalSharedField(batch_size=1))
                for key, value in data.items()
            }
        )
        return SimpleNamespace(data=item, modality="image")

    grid, pixels = torch.tensor([1, 4, 4]), torch.zeros(16, 8)
    fields = ItemFields(config(models["qwen"]).model_config)
    assert fields.has_media(feature(image_grid_thw=grid, pixel_values=pixels))
    assert not fields.has_media(feature(image_grid_thw=grid))
    assert not fields.has_media(feature(image_grid_thw=grid, pixel_values=None))
    assert not fields.has_media(SimpleNamespace(data=None, modality="image"))


def test_an_emptied_encoder_cache_is_told() -> None:
    """vLLM's scheduler empties its cache by the method that is watched, and still does so."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    told: list[str] = []
    manager = EncoderCacheManager(cache_size=8)
    manager.num_free_slots = 3
    end_one, end_two = (watch_resets(lambda name=name: told.append(name)) for name in ("a", "b"))
    Scheduler.reset_encoder_cache(SimpleNamespace(encoder_cache_manager=manager))
    assert told == ["a", "b"]
    assert manager.num_free_slots == 8
    end_one()
    manager.reset()
    end_two()
    manager.reset()
    assert told == ["a", "b", "b"]


def test_new_weights_are_told(models: dict[str, Path]) -> None:
    """The calls that are watched are those by which vLLM's API changes weights."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore

    vllm_config = config(models["qwen"])
    identity = engine_facts(vllm_config).identity
    asked: list[tuple[Any, ...]] = []
    workers = SimpleNamespace(collective_rpc=lambda *call: asked.append(call) or [])
    core = SimpleNamespace(model_executor=workers)
    told: list[Identity] = []

    end = watch_weights(vllm_config, identity, told.append)
    EngineCore.collective_rpc(core, "profile")
    assert told == []
    EngineCore.collective_rpc(core, "reload_weights", None, (), {})
    assert [agree(identity, one) is None for one in told] == [False, True]
    EngineCore.set_weight_version(core, "7")
    assert told[-1].factors["weights_version"] == "version 7"
    end()
    EngineCore.collective_rpc(core, "update_weights", kwargs={"update_info": {}})
    assert len(told) == 3
    assert asked == [
        ("profile", None, (), None),
        ("reload_weights", None, (), {}),
        ("update_weights", None, (), {"update_info": {}}),
    ]

    engine = SimpleNamespace(collective_rpc=lambda name, **_kwargs: calls.append(name) or done())
    calls: list[str] = []

    async def done() -> None: ...

    for call in (AsyncLLM.start_weight_update, AsyncLLM.finish_weight_update):
        asyncio.run(call(engine))
    asyncio.run(AsyncLLM.update_weights(engine, SimpleNamespace(update_info={})))
    assert all(may_change(name) for name in calls)
    assert len(calls) == 3
