# SPDX-License-Identifier: Apache-2.0
"""The verbs. Each imports what it needs when it runs, so that ``--help`` stays quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ec_connector import __version__
from ec_connector.config import LOG_LEVELS, SETTING_KEYS, AgentOptions, Settings
from ec_connector.errors import ConfigError, ECConnectorError
from ec_connector.protocol.effects import Address

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Encoder outputs of multimodal models, moved between vLLM engines.",
)
# The verb has options of its own, --help among them.
_PASS_THROUGH = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
_SETTINGS_HELP = "Settings as a JSON object, or a file that holds one."
_AGENT_HELP = "Only this agent of this host, ipc://... as it printed."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Encoder outputs of multimodal models, moved between vLLM engines."""


@app.command()
def config(
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="FILE|JSON", help=f"Check this. {_SETTINGS_HELP}"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print every setting with its default, or check a configuration.

    Files that it names (keys) are looked at by doctor, on the host that has them.
    """
    if check is not None:
        settings = _settings(check)
        print(settings.to_json().decode() if as_json else "the configuration is good")
        return
    if as_json:
        rows = [
            {
                "key": key.name,
                "type": key.kind,
                "default": key.written(key.default),
                "description": key.description,
            }
            for key in SETTING_KEYS
        ]
        print(msgspec.json.encode(rows).decode())
        return
    table = Table("key", "default", "what it does")
    for key in SETTING_KEYS:
        table.add_row(key.name, _plain(key.written(key.default)), key.description)
    _console().print(table)


@app.command()
def doctor(
    settings: Annotated[
        str, typer.Option("--config", metavar="FILE|JSON", help=_SETTINGS_HELP)
    ] = "{}",
    as_json: AsJson = False,
) -> None:
    """Check whether this host and this Python can run the connector."""
    from ec_connector.cli.doctor import PROBLEM, examine

    findings = examine(_settings(settings))
    if as_json:
        print(msgspec.json.encode(findings).decode())
    else:
        table = Table("check", "", "finding")
        for finding in findings:
            table.add_row(finding.check, finding.status, finding.text)
        _console().print(table)
    if any(finding.status == PROBLEM for finding in findings):
        raise typer.Exit(1)


@app.command()
def keygen(
    name: Annotated[str, typer.Argument(metavar="DIR", help="Made if it is not there.")],
    as_json: AsJson = False,
) -> None:
    """Make the key pairs with which agents encrypt and know each other (curve_keys)."""
    from ec_connector.curve import make_keys

    if not name:  # as an unset variable leaves it: not the directory we happen to be in
        print("DIR is empty: name the directory that is to hold the keys", file=sys.stderr)
        raise typer.Exit(2)
    directory = Path(name)
    try:
        files = [str(path) for path in make_keys(directory)]
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    if as_json:
        print(msgspec.json.encode({"files": files}).decode())
        return
    print(*files, sep="\n")
    print(f'set "curve_keys": "{directory.absolute()}"; producers need server.key_secret and')
    print("client.key, consumers client.key_secret and server.key, and nobody needs more.")


@app.command()
def agent(
    settings: Annotated[
        str, typer.Option("--config", metavar="FILE|JSON", help=_SETTINGS_HELP)
    ] = "{}",
    log_level: Annotated[
        str, typer.Option("--log-level", help=f"One of {', '.join(LOG_LEVELS)}.")
    ] = "INFO",
    as_json: AsJson = False,
) -> None:
    """Run an agent on its own until it is interrupted, and print where it listens."""
    from ec_connector.agent.__main__ import run

    chosen = _settings(settings)
    if chosen.agent:
        print("an agent cannot use another agent: leave the key agent out", file=sys.stderr)
        raise typer.Exit(1)
    try:
        options = AgentOptions(settings=chosen, log_level=log_level.upper())
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error

    def announce(facts: dict[str, object]) -> None:
        if as_json:
            print(msgspec.json.encode(facts).decode(), flush=True)
        elif "error" in facts:
            print(facts["error"], file=sys.stderr)
        else:
            print(*(f"{name}: {fact}" for name, fact in facts.items()), sep="\n", flush=True)

    raise typer.Exit(run(options, announce))


@app.command()
def ping(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="host:port of a producer's agent.")],
    settings: Annotated[
        str, typer.Option("--config", metavar="FILE|JSON", help=_SETTINGS_HELP)
    ] = "",
    agent: Annotated[str, typer.Option("--agent", metavar="ENDPOINT", help=_AGENT_HELP)] = "",
    count: Annotated[int, typer.Option("--count", min=1, max=1000, help="Round trips.")] = 5,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, max=3600, help="Seconds for all of it.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Ask a producer what it is, and whether this host's agents could use it (status 1: no).

    With --config as its consumers: their keys, ticket key and allow_peers.
    """
    from ec_connector.cli.agents import look
    from ec_connector.cli.ping import fits
    from ec_connector.cli.ping import ping as ask
    from ec_connector.cli.pinged import table

    chosen = _settings(settings) if settings else Settings(allow_peers=["*"])
    address = _peer(peer)
    try:
        reply = ask(address, chosen, count, timeout)
        agents = look(agent)
    except ECConnectorError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    found = fits(reply.pong, [one for one in agents if one.address != reply.address])
    if as_json:
        print(msgspec.json.encode({"reply": reply, "fits": found}).decode())
    else:
        _console().print(table(reply, found))
    if reply.pong.withheld:
        print(f"{reply.address} answers only who has its ticket_key", file=sys.stderr)
    for fit in found:
        if fit.factor:
            text = f"incompatible with agent {fit.agent_pid}: {fit.factor} differs: "
            print(f"{text}{fit.here!r} here, {fit.there!r} at the peer", file=sys.stderr)
    if reply.pong.withheld or any(fit.factor for fit in found):
        raise typer.Exit(1)


@app.command()
def top(
    agent: Annotated[str, typer.Option("--agent", metavar="ENDPOINT", help=_AGENT_HELP)] = "",
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between looks.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Watch the agents of this host: peers, rates, pool, waits, fallbacks, latest transfers."""
    from ec_connector.cli.agents import watch
    from ec_connector.cli.watching import follow

    try:
        agents = watch(agent)
    except ECConnectorError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error
    if once and not agents and not as_json:
        print("no agent of this user runs on this host", file=sys.stderr)
        raise typer.Exit(1)
    follow(agents, _console(), interval, once=once, as_json=as_json, fixed=bool(agent))


@app.command(context_settings=_PASS_THROUGH)
def demo(context: typer.Context) -> None:
    """Run a real producer/consumer pair on tiny models, beside an ordinary vLLM."""
    from ec_connector.demo import main

    raise typer.Exit(main(context.args))


@app.command(context_settings=_PASS_THROUGH)
def bench(context: typer.Context) -> None:
    """Measure transfers here, beside vLLM's in-tree pair and what the machine can do."""
    from ec_connector.bench.app import main

    raise typer.Exit(main(context.args))


@app.command(context_settings=_PASS_THROUGH)
def proxy(context: typer.Context) -> None:
    """Route OpenAI chat requests: media to an encoding server, then all to a decoding one."""
    from ec_connector.proxy import main

    raise typer.Exit(main(context.args))


@app.command("encode-server", context_settings=_PASS_THROUGH)
def encode_server(context: typer.Context) -> None:
    """Encode images with a graph (ONNX) instead of vLLM, for vLLM consumers."""
    from ec_connector.encoder import main

    raise typer.Exit(main(context.args))


def _settings(text: str) -> Settings:
    """Settings from JSON or from a file; ends the command when there are none."""
    if not text.lstrip().startswith("{"):
        if not text:  # not the directory we are in, as Path("") would be
            print("no settings given: write a JSON object, or name a file", file=sys.stderr)
            raise typer.Exit(2)
        try:
            text = Path(text).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            print(f"{text!r} is not UTF-8 text ({error}): save it as UTF-8", file=sys.stderr)
            raise typer.Exit(2) from error
        except OSError as error:
            print(f"cannot read {text!r} (and it is no JSON object): {error}", file=sys.stderr)
            raise typer.Exit(2) from error
    try:
        return Settings.from_json(text)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error


def _peer(text: str) -> Address:
    """``host:port`` or ``[address]:port``; ends the command when it is neither."""
    host, _, port = text.rpartition(":")
    bare = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bare) or not port.isascii() or not port.isdigit():
        print(f"{text!r} is no peer: write host:port or [address]:port", file=sys.stderr)
        raise typer.Exit(2)
    if not 0 < int(port) <= 65535:
        print(f"{text!r}: the port must be 1 to 65535", file=sys.stderr)
        raise typer.Exit(2)
    return Address(host.strip("[]"), int(port))


def _console() -> Console:
    # Settings and findings are text: "[::1]:5000" is an address, no markup.
    return Console(markup=False, emoji=False, highlight=False)


def _plain(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)
