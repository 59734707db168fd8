# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines for the end-to-end tests, started when first needed and shared by all tests.

At most three run at a time; the one that was used longest ago makes room. Tests
that belong to the same engines therefore stand together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Any

import pytest

HERE = Path(__file__).parent
START_SECONDS = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here starts engines, and may wait for them."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(START_SECONDS + 60))
            item.add_marker(pytest.mark.leaves("engines go on for the tests that come after"))


if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from ec_connector.curve import make_keys
    from ec_connector.demo.chat import Answer, Body, ask
    from ec_connector.demo.crew import CONSUMER, PRODUCER
    from ec_connector.demo.models import make_llava, make_qwen2_vl
    from ec_connector.demo.questions import Album
    from ec_connector.demo.readings import COUNTING_ENV, COUNTING_OPTIONS
    from ec_connector.demo.servers import Server, Servers, free_ports, vllm_command, vllm_env
    from ec_connector.proxy.rewrite import decode_body, encode_body

V2_ENV = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": str(HERE / "v2_site"),
}
TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
# Two ranks that spin, each bound to a core, can leave an agent none for seconds where there are
# only two; what this engine is asked here is not how soon it gives up.
PATIENT = {"fetch_timeout": "90s", "connect_timeout": "60s"}


# Quick to make again when an agent was killed, with other engines on the same cores.
SMALL_POOL = {"pool_size": "128MiB"}


@dataclass(frozen=True)
class Role:
    """How to start an engine. ``model`` is a key of :attr:`Fleet.models`.

    ``secured``: with keys and tickets, those of :attr:`Fleet.secrets`. ``registers``: at the
    router of :attr:`Fleet.router_port`, whenever one listens there.
    """

    ec: Mapping[str, Any] | None = None
    model: str = "qwen"
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    secured: bool = False
    registers: bool = False


def roles() -> dict[str, Role]:
    """Every engine that a test may ask for, by name."""
    both = {**PRODUCER, "ec_role": "ec_both"}
    # So few tokens a step that the prompt of one photo is prefilled in chunks.
    chunked = ("--max-num-batched-tokens", "256")
    two_ranks = ("--tensor-parallel-size", "2", "--mm-encoder-tp-mode", "data")
    tight = ("--mm-processor-kwargs", json.dumps({"max_pixels": 640 * 480}))
    trusting = ("--trust-request-mm-kwargs",)
    # Requests so short that a video has no more rows than an image: the encoder cache then holds
    # one image of the largest size. And KV blocks for two requests of two such images each, as
    # long as neither has decoded much.
    cramped = (*chunked, "--max-model-len", "2040", "--no-enable-prefix-caching")
    cramped += ("--block-size", "32", "--num-gpu-blocks-override", "126")
    pixels = ("--mm-processor-kwargs", json.dumps({"max_pixels": 200 * 28 * 28}))
    return {
        "alone": Role(),
        "producer": Role(PRODUCER),
        "consumer": Role(CONSUMER, options=chunked, registers=True),
        "both": Role(both, options=trusting, secured=True),
        "both-open": Role(both),  # without keys, as the other engines here
        "both-cramped": Role(
            both,
            options=(*cramped, *trusting),
            settings={"fetch_timeout": "30s"},
            secured=True,
        ),
        "both-v2": Role(both, env=V2_ENV),
        "consumer-v2": Role(CONSUMER, env=V2_ENV),
        "consumer-tp2": Role(
            CONSUMER,
            options=two_ranks,
            env=TWO_CORES,
            settings=PATIENT,
        ),
        # Its pool holds one photo of 640 x 480, and it is reached by IPv6.
        "producer-small": Role(PRODUCER, settings={"pool_size": "384KiB", "bind_host": "::1"}),
        "producer-tight": Role(
            PRODUCER,
            options=tight,
            settings={"advertise_host": "localhost", "codecs": ["zstd", "none"]},
        ),
        # Room for two photos in its pool. The producer, which runs with the same options, is
        # reached by its host's name. Rows come packed or not at all.
        "consumer-tight": Role(
            CONSUMER,
            options=(*tight, *chunked),
            settings={
                "pool_size": "512KiB",
                "fetch_timeout": "3s",
                "planes": ["zmq"],
                "codecs": ["zstd"],
            },
        ),
        "both-dp2": Role(
            {**PRODUCER, "ec_role": "ec_both"},
            options=("--data-parallel-size", "2"),
            env=TWO_CORES,
            settings=PATIENT,
        ),
        "producer-tp2": Role(PRODUCER, options=two_ranks, env=TWO_CORES),
        # In float32, where ONNX Runtime and torch differ by rounding alone.
        "consumer-llava": Role(CONSUMER, model="llava", options=("--dtype", "float32")),
        "producer-dtype": Role(PRODUCER, options=("--dtype", "float32")),
        "producer-model": Role(PRODUCER, model="other"),
        "producer-options": Role(PRODUCER, options=pixels),
        "producer-weights": Role(PRODUCER),
    }


class Fleet:
    """The engines that run now."""

    MOST = 3

    def __init__(
        self,
        servers: Servers,
        models: Mapping[str, Path],
        secrets: Mapping[str, str],
        router_token: Path,
    ) -> None:
        self.servers = servers
        self.models = models
        self.secrets = secrets
        (self.router_port,) = free_ports(1)
        self.router_token = router_token
        self._roles = roles()
        self._running: dict[str, Server] = {}  # the least recently used first

    def need(self, *names: str) -> list[Server]:
        """These engines, running and healthy; those that are not are started together."""
        for name in [name for name, one in self._running.items() if one.process.poll() is not None]:
            self.stop(name)
        for name in names:
            if name in self._running:
                self._running[name] = self._running.pop(name)
        missing = [name for name in names if name not in self._running]
        others = [name for name in self._running if name not in names]
        for name in others[: max(0, len(self._running) + len(missing) - self.MOST)]:
            self.stop(name)
        for name in missing:
            self._running[name] = self._start(name)
        self.servers.wait_healthy([self._running[name] for name in names], timeout=START_SECONDS)
        return [self._running[name] for name in names]

    def stop(self, name: str) -> None:
        """End an engine if it runs."""
        if name in self._running:
            self.servers.stop([self._running.pop(name)])

    def logs(self) -> list[str]:
        """The ends of the logs of all that run."""
        return [server.tail() for server in self._running.values()]

    def _start(self, name: str) -> Server:
        role, port = self._roles[name], free_ports(1)[0]
        settings = {**SMALL_POOL, **role.settings, **(self.secrets if role.secured else {})}
        if role.registers:
            settings |= {
                "proxy_url": f"http://127.0.0.1:{self.router_port}",
                "http_url": f"http://127.0.0.1:{port}",
                "proxy_token": str(self.router_token),
            }
        command = vllm_command(
            self.models[role.model],
            port,
            *COUNTING_OPTIONS,
            *role.options,
            ec=role.ec and {**role.ec, "ec_connector_extra_config": settings},
        )
        # As many cores apart as there are: a producer and its consumer never share one.
        env = {**vllm_env(len(self._running)), **COUNTING_ENV, **role.env}
        return self.servers.start(name, command, port=port, env=env)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The engines, and in the end a look at what they left behind."""
    folder = tmp_path_factory.mktemp("models")
    models = {
        "qwen": make_qwen2_vl(folder / "tiny-qwen2-vl"),
        "other": make_qwen2_vl(folder / "other-qwen2-vl", seed=1),
        "llava": make_llava(folder / "tiny-llava"),
    }
    make_keys(folder / "keys")
    secrets = {
        "curve_keys": str(folder / "keys"),
        "ticket_key": str(folder / "keys" / "ticket_key"),
    }
    token = folder / "router_token"
    token.write_text(token_hex(32))
    token.chmod(0o600)
    with Servers() as servers:
        yield Fleet(servers, models, secrets, token)
    # vLLM itself leaves the shared memory of an engine of several ranks.
    assert [line for line in servers.leftovers if "vllm_dist_" not in line] == []


@pytest.fixture(scope="session")
def album(tmp_path_factory: pytest.TempPathFactory) -> Album:
    """Draws a new picture file whenever asked."""
    return Album(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def reference(fleet: Fleet) -> Callable[[Body], Answer]:
    """What an ordinary vLLM answers to a body; asked once for each."""
    known: dict[str, Answer] = {}

    def answer(body: Body) -> Answer:
        key = json.dumps(body)
        if key not in known:
            (alone,) = fleet.need("alone")
            known[key] = ask(alone.url, body)
            assert known[key].status == 200, known[key].error
        return known[key]

    return answer


@pytest.fixture(scope="session")
def encode() -> Callable[[Server, Body], Body]:
    """Has a producer encode a body's media; returns what it announces."""

    def announced(producer: Server, body: Body) -> Body:
        answer = ask(producer.url, encode_body(body))
        assert answer.status == 200, answer.error
        return answer.announced

    return announced


@pytest.fixture(scope="session")
def decode() -> Callable[[Server, Body, Body], Answer]:
    """Sends a consumer a body with what a producer announced."""

    def answered(consumer: Server, body: Body, announced: Body) -> Answer:
        return ask(consumer.url, decode_body(body, announced))

    return answered


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Put the ends of the engines' logs on the report of a test that failed."""
    report = yield
    fleet = getattr(item, "funcargs", {}).get("fleet")
    if report.failed and report.when != "teardown" and fleet is not None:
        report.sections.append(("engine logs", "\n".join(fleet.logs())))
    return report
