# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks: one function each, from settings to a status and a sentence.

Each does what the connector will do: it maps a region from another process, binds the
port, watches a process. vLLM itself is not imported. A new one is a function here, and
a line in ``doctor.CHECKS``.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from ec_connector.agent.__main__ import FILES_PER_PEER, least_files
from ec_connector.agent.channel import connect
from ec_connector.agent.listen import exposure
from ec_connector.cli.vllm_probe import MISSING_HOOKS_ADVICE, find_vllm
from ec_connector.codecs.choice import NONE, lacking, usable_codecs
from ec_connector.config import WILDCARD_HOSTS, Settings
from ec_connector.curve import CLIENT, AllowedKeys, load_keys
from ec_connector.errors import ConfigError, RegionError
from ec_connector.plugin import DISABLE_VARIABLE
from ec_connector.pool.memory import memory_room
from ec_connector.pool.region import Region
from ec_connector.ticket_file import load_tickets
from ec_connector.units import format_size

GOOD, NOTE, PROBLEM = "good", "note", "problem"
_PAGE = 4096
_CHILD_SECONDS = 30.0
_MAP_FROM_CHILD = """\
import sys
import msgspec
from ec_connector.errors import RegionError
from ec_connector.pool.region import Region
from ec_connector.protocol.messages import RegionRef
try:
    ref = msgspec.json.decode(sys.stdin.buffer.read(), type=RegionRef)
    region = Region.open(ref, writable=True)
except RegionError as error:
    sys.exit(str(error))
region.set_generation(0, 7)
region.close()
"""

Outcome = tuple[str, str]
"""``GOOD``, ``NOTE`` (works, but worth knowing) or ``PROBLEM``, and what was found."""


def python(_: Settings) -> Outcome:
    """Linux, and which Python."""
    text = f"{platform.python_implementation()} {platform.python_version()} on {sys.platform}"
    if sys.platform != "linux":
        return PROBLEM, f"{text}; the agent needs Linux (memfd, /proc, pidfd)"
    return GOOD, text


def libraries(_: Settings) -> Outcome:
    """Versions of what the package needs."""
    found = [f"{name} {importlib.metadata.version(name)}" for name in ("pyzmq", "msgspec", "numpy")]
    return GOOD, ", ".join(found)


def vllm(_: Settings) -> Outcome:
    """Whether the installed vLLM has the hooks."""
    vllm = find_vllm()
    if vllm is None:
        return NOTE, "not installed here: only Producer, Consumer and the agent can be used"
    if vllm.missing_hooks:
        missing = ", ".join(vllm.missing_hooks)
        return PROBLEM, f"vLLM {vllm.version} lacks {missing}; {MISSING_HOOKS_ADVICE}"
    return GOOD, f"vLLM {vllm.version} has every hook that the connector relies on"


def plugin(_: Settings) -> Outcome:
    """Whether vLLM will load the connector by name."""
    entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "ec_connector" not in entries.names:
        return PROBLEM, (
            "vLLM will not find the connector by name: the package is not installed in this "
            "Python; pip install ec-connector"
        )
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return NOTE, f"switched off by {DISABLE_VARIABLE}=1"
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "ec_connector" not in allowed.split(","):
        return NOTE, (
            f"VLLM_PLUGINS={allowed!r} leaves it out: add ec_connector there, or set "
            f'"ec_connector_module_path": "ec_connector"'
        )
    return GOOD, "visible to vLLM as ec_connector"


def process_watching(_: Settings) -> Outcome:
    """Whether an agent can notice its engine's end."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return (
            PROBLEM,
            f"no pidfd ({error}), so an agent could outlive its engine; Linux 5.3 has it",
        )
    return GOOD, "pidfd works: an agent ends with its engine"


def shared_memory(_: Settings) -> Outcome:
    """Map a region from a second process, as engine, agent and workers do."""
    try:
        region = Region.create(_PAGE, _PAGE)
    except RegionError as error:
        return PROBLEM, str(error)
    try:
        child = subprocess.run(
            [sys.executable, "-c", _MAP_FROM_CHILD],
            input=msgspec.json.encode(region.ref),
            capture_output=True,
            timeout=_CHILD_SECONDS,
            check=False,
        )
        seen = region.generation(0)
    except subprocess.TimeoutExpired:
        return PROBLEM, f"a second process did not map the region within {_CHILD_SECONDS:.0f} s"
    finally:
        region.close()
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return PROBLEM, f"a second process cannot map the region: {lines[-1]}"
    if seen != 7:
        return PROBLEM, "what a second process writes to the region is not seen here"
    return GOOD, "a region can be mapped and written from a second process"


def open_files(settings: Settings) -> Outcome:
    """Whether as many files may be open as peers need."""
    if settings.agent:
        return NOTE, "the running agent has its own limit"
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = least_files(settings)
    wanted = least + FILES_PER_PEER * settings.max_peers
    if most < least:
        return PROBLEM, f"only {most} may be open, an agent needs {least}; raise ulimit -n"
    if most < wanted:
        return NOTE, (
            f"{most} may be open: enough for some {(most - least) // FILES_PER_PEER} peers, "
            f"not for max_peers={settings.max_peers}; raise ulimit -n to {wanted}"
        )
    return GOOD, f"{most} may be open, {wanted} are enough for max_peers={settings.max_peers}"


def pool_size(settings: Settings) -> Outcome:
    """Whether the pool's memory can be had."""
    wanted = format_size(settings.pool_size)
    if settings.agent:
        return NOTE, "the running agent has its own"
    room = memory_room()
    if room is None:
        return NOTE, f"pool_size={wanted}; this system does not tell how much memory is free"
    free = f"{room.nbytes / 2**30:.1f}GiB ({room.source})"
    if room.nbytes < settings.pool_size:
        return PROBLEM, f"pool_size={wanted} but only {free} can be had; make it smaller"
    return GOOD, f"pool_size={wanted} of {free}"


def address(settings: Settings) -> Outcome:
    """Bind what the agent would bind, or meet the one that runs."""
    if settings.agent:
        try:
            connect(settings.agent).close()
        except OSError as error:
            return PROBLEM, (
                f"no agent answers at agent={settings.agent!r:.120}: {error}; give the endpoint "
                "that a running 'ec-connector agent' printed"
            )
        return GOOD, f"an agent answers at {settings.agent}"
    host = settings.bind_host or "127.0.0.1"
    where = f"{host} port {settings.port or '(any)'}"
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            None if host in WILDCARD_HOSTS else host,
            settings.port,
            family=socket.AF_INET if host in ("*", "0.0.0.0") else 0,  # noqa: S104 - the operator's
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        with socket.socket(family, kind, number) as probe:
            # As ZMQ binds: connections of an earlier process that linger do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return PROBLEM, f"cannot listen on {where}: {error}; change bind_host or port"
    return GOOD, f"can listen on {where}"


def codecs(settings: Settings) -> Outcome:
    """Which of the chosen codecs can be used here."""
    if settings.agent:
        return NOTE, "the running agent has its own"
    try:
        usable = usable_codecs(settings.codecs)
    except ConfigError as error:
        return PROBLEM, str(error)
    remedies = [f"without {name}: {remedy}" for name, remedy in lacking(settings.codecs).items()]
    if remedies:
        return NOTE, f"{', '.join(usable)}; {'; '.join(remedies)}"
    if usable == (NONE,):
        return GOOD, "rows travel as they are"
    return GOOD, f"{', '.join(usable)}, with peers that have them too"


def access(settings: Settings) -> Outcome:
    """Read the keys as the agent will, or say what their lack means."""
    if settings.agent:
        return NOTE, "the running agent decides"
    if warning := exposure(settings):
        return PROBLEM, warning
    if not settings.curve_keys:
        return _access_by_ticket(settings)
    directory = Path(settings.curve_keys)
    try:
        load_tickets(settings.ticket_key)
        keys = load_keys(directory)
        parts = []
        if keys.server is not None:
            listed = Path(settings.curve_allow or directory / f"{CLIENT}.key")
            allowed = AllowedKeys(listed, time.monotonic())
            if lack := allowed.lack():
                return PROBLEM, lack
            parts.append(f"serves {len(allowed)} client keys")
        if keys.client is not None:
            parts.append("may fetch")
    except ConfigError as error:
        return PROBLEM, str(error)
    return GOOD, f"encrypted; this agent {' and '.join(parts)}"


def _access_by_ticket(settings: Settings) -> Outcome:
    try:
        tickets = load_tickets(settings.ticket_key)
    except ConfigError as error:
        return PROBLEM, str(error)
    if tickets is None:
        return GOOD, "peers on this host only; no keys needed"
    return NOTE, "only what has a ticket is served; nothing is encrypted without curve_keys"
