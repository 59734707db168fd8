# SPDX-License-Identifier: Apache-2.0
"""How much of a link a transfer uses: two network namespaces as two hosts, joined by a cable.

    sudo python bench/two_hosts.py [--json]

Needs root, iproute2 (``ip`` and ``tc``) and the tbf queue. The cable's rate is the token
bucket's; a delay is added on each way by a relay, as not every kernel has netem. Items of 47 MB,
over ZMQ, one at a time and two at a time; utilisation is payload bits a second over the rate.
The namespaces are removed at the end, on Ctrl-C too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from ec_connector.bench.children import Child, serve_parent
from ec_connector.bench.ours import Fetcher, settings_for
from ec_connector.bench.plan import LARGE
from ec_connector.errors import ECConnectorError
from ec_connector.protocol.local import Failed, Fetch, FetchItem, Ready, Release

HOSTS = {"ec-bench-a": "10.99.0.1", "ec-bench-b": "10.99.0.2"}
A, B = HOSTS
ITEMS = 6
"""More than the consumer's pool holds, so that each fetch goes over the cable."""
RELAY_PORT = 20007
GBIT = 1_000_000_000
CASES = [(10, 0.0), (10, 1.0), (1, 0.0), (1, 1.0), (1, 20.0)]
"""Rate in Gbit/s and delay in ms on each way."""


def run(*words: str) -> None:
    """Run a command of the system. Raises CalledProcessError with its words."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def cable() -> Iterator[None]:
    """Two namespaces and a veth pair between them."""
    try:
        for name in HOSTS:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "link", "add", "ec0", "netns", A, "type", "veth", "peer", "ec0", "netns", B)
        for name, address in HOSTS.items():
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "ec0")
            run("ip", "-n", name, "link", "set", "ec0", "up")
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def shape(gbit: int) -> None:
    """Set the rate of both ends."""
    for name in HOSTS:
        tbf = ["tbf", "rate", f"{gbit}gbit", "burst", f"{gbit}mb", "latency", "20ms"]
        run("tc", "-n", name, "qdisc", "replace", "dev", "ec0", "root", *tbf)


def fetch_all(items: list[FetchItem], at_once: int) -> tuple[float, float]:
    """Median seconds of a fetch, and payload bytes a second over all of them."""
    extra = {"allow_peers": ["10.99.0.0/24"], "planes": ["zmq"], "fetch_timeout": "60s"}
    with Fetcher(settings_for(LARGE, at_once, extra)) as fetcher:
        fetcher.transfer(items[0], "zmq")  # connects, and opens TCP's window
        todo, begun, times = items[1:] * 3, dict[str, float](), []
        first = time.perf_counter()
        while todo or begun:
            while todo and len(begun) < at_once and todo[0].key not in begun:
                begun[todo[0].key] = time.perf_counter()
                fetcher.link.send(Fetch([todo.pop(0)]))
            for event in fetcher.link.wait(1.0):
                if isinstance(event, Failed):
                    raise ECConnectorError(f"{event.key}: {event.reason}: {event.message}")
                if isinstance(event, Ready):
                    if event.plane != "zmq":
                        raise ECConnectorError(f"{event.key} came by {event.plane}")
                    times.append(time.perf_counter() - begun.pop(event.key))
                    fetcher.link.send(Release([event.key]))
        rate = len(times) * LARGE / (time.perf_counter() - first)
    return statistics.median(times), rate


async def relay(target: int, delay: float, listening: Callable[[], None]) -> None:
    """Pass bytes between whoever connects and the target, each ``delay`` seconds late."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4096)

        async def late() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(data)
                await writer.drain()

        task = asyncio.create_task(late())
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                await queue.put((loop.time() + delay, data))
        task.cancel()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(HOSTS[A], target)
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    server = await asyncio.start_server(serve, HOSTS[A], RELAY_PORT, limit=1 << 22)
    async with server:
        listening()
        await server.serve_forever()


def part() -> None:
    """In a child: the relay, or the consumer's host."""
    for (name, arguments), answer in serve_parent():
        if name == "fetch":
            items = msgspec.convert(arguments["items"], list[FetchItem])
            answer([fetch_all(items, at_once) for at_once in (1, 2)])
        else:
            asyncio.run(relay(**arguments, listening=partial(answer, True)))


def case(gbit: int, delay_ms: float) -> dict[str, float]:
    """One line of the table."""
    shape(gbit)
    on = {name: ("ip", "netns", "exec", name) for name in HOSTS}
    here = {"PYTHONPATH": os.path.dirname(os.path.abspath(__file__))}
    extra = json.dumps({"bind_host": HOSTS[A]})
    with contextlib.ExitStack() as stack:
        words = [str(LARGE), str(ITEMS), extra]
        holder = stack.enter_context(Child("ec_connector.bench.holder", words, prefix=on[A]))
        items = holder.ask("items", 60.0)
        if delay_ms:
            late = stack.enter_context(Child("two_hosts", ["part"], prefix=on[A], env=here))
            late.ask(["relay", {"target": items[0]["peer_port"], "delay": delay_ms / 1e3}], 10.0)
            items = [item | {"peer_port": RELAY_PORT} for item in items]
        consumer = stack.enter_context(Child("two_hosts", ["part"], prefix=on[B], env=here))
        (one, one_rate), (_, two_rate) = consumer.ask(["fetch", {"items": items}], 300.0)
    return {
        "gbit": gbit,
        "delay_ms": delay_ms,
        "median_ms": round(1e3 * one, 1),
        "utilisation": round(one_rate * 8 / (gbit * GBIT), 3),
        "utilisation_two": round(two_rate * 8 / (gbit * GBIT), 3),
    }


def main() -> int:
    """Every case; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    with cable():
        for gbit, delay in CASES:
            found = case(gbit, delay)
            if options.json:
                print(json.dumps(found), flush=True)
                continue
            print(
                f"{gbit:>3} Gbit/s, {delay:>4.0f} ms each way: "
                f"47 MB in {found['median_ms']:.0f} ms, "
                f"{found['utilisation']:.0%} of the link; two at once "
                f"{found['utilisation_two']:.0%}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["part"]:
        part()
    else:
        sys.exit(main())
