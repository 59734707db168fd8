# SPDX-License-Identifier: Apache-2.0
"""The deployment examples: valid for their schema, and each name means the same everywhere.

No cluster runs here: what a kubelet would do is done by hand where it matters.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ec_connector.config import Settings
from ec_connector.curve import load_keys, make_keys
from ec_connector.proxy.options import parse_options
from ec_connector.ticket_file import load_tickets
from ec_connector.token_file import load_token

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
MANIFESTS = sorted(KUBERNETES.glob("*.yaml"))
ENGINES = ("ec-producer", "ec-consumer")
MOUNT = "/etc/ec-connector"


def documents() -> Iterator[dict[str, Any]]:
    """Every object of every manifest."""
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def found(kind: str, name: str) -> dict[str, Any]:
    """The one object of that kind and name."""
    (one,) = [d for d in documents() if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return one


def pod(name: str) -> dict[str, Any]:
    """The pods that a Deployment makes."""
    template: dict[str, Any] = found("Deployment", name)["spec"]["template"]
    return template


def container(name: str) -> dict[str, Any]:
    """Their one container."""
    (one,) = pod(name)["spec"]["containers"]
    return dict(one)


def transfer_config(args: list[str]) -> dict[str, Any]:
    """What ``--ec-transfer-config`` says once a kubelet has put the pod's address in."""
    text = args[args.index("--ec-transfer-config") + 1].replace("$(POD_IP)", "10.1.2.3")
    assert "$(" not in text
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def settings_of(args: list[str]) -> Settings:
    """The connector's settings in it."""
    return Settings.parse(transfer_config(args).get("ec_connector_extra_config", {}))


@pytest.mark.parametrize(
    "document", list(documents()), ids=lambda d: f"{d['kind']}-{d['metadata']['name']}"
)
def test_manifest_is_valid(document: dict[str, Any]) -> None:
    """By the newest schema that the validator brings; unknown fields are refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own use of importlib
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    if document["kind"] == "Deployment":
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_validator_refuses() -> None:
    """What is no field of a Service; else the test above could not fail."""
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"porst": 1}}
    with pytest.raises(Exception, match="porst"):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_settings_and_ports_agree() -> None:
    """The connector takes its settings; its port, the pods' and the policies' are one."""
    agent_ports = {"ec-producer": 15000, "ec-consumer": None}
    for name, port in agent_ports.items():
        args = container(name)["args"]
        config, settings = transfer_config(args), settings_of(args)
        assert config["ec_role"] == name.replace("-", "_")
        assert config.get("ec_port") == port
        ports = {one["name"]: one["containerPort"] for one in container(name)["ports"]}
        assert ports.get("agent") == port
        assert f"--port={ports['http']}" in args
        assert settings.http_url == f"http://10.1.2.3:{ports['http']}"
        admitted = {
            rule_port["port"]
            for rule in found("NetworkPolicy", name)["spec"]["ingress"]
            for rule_port in rule["ports"]
        }
        assert admitted == set(ports.values())
    assert settings_of(container("ec-producer")["args"]).advertise_host == "10.1.2.3"


def test_only_consumers_reach_agents_and_only_the_router_reaches_engines() -> None:
    """The labels that the policies name are those of the pods."""
    admitted = {}
    for name in ENGINES:
        policy = found("NetworkPolicy", name)["spec"]
        assert (
            policy["podSelector"]["matchLabels"].items() <= pod(name)["metadata"]["labels"].items()
        )
        assert policy["policyTypes"] == ["Ingress"]
        for rule in policy["ingress"]:
            (source,) = rule["from"]
            (port,) = rule["ports"]
            admitted[name, port["port"]] = source["podSelector"]["matchLabels"]["app"]
    assert admitted == {
        ("ec-producer", 8000): "ec-router",
        ("ec-producer", 15000): "ec-consumer",
        ("ec-consumer", 8000): "ec-router",
    }


def test_memory_covers_the_pool() -> None:
    """It is the container's own, beside what vLLM needs; and it may not be overcommitted."""
    for name in ENGINES:
        resources = container(name)["resources"]
        memory = resources["requests"]["memory"]
        assert memory == resources["limits"]["memory"]
        assert (
            int(memory.removesuffix("Gi")) << 30
            >= 4 * settings_of(container(name)["args"]).pool_size
        )


def test_router_takes_its_arguments_and_is_where_engines_register() -> None:
    """Its command line is one, and the address that engines are told is a Service of it."""
    command = container("ec-router")["command"] + container("ec-router")["args"]
    assert command[:2] == ["ec-connector", "proxy"]
    options = parse_options(command[2:])
    (port,) = [one["containerPort"] for one in container("ec-router")["ports"]]
    assert (options.host, options.port) == ("0.0.0.0", port)
    for name in ENGINES:
        settings = settings_of(container(name)["args"])
        host = re.fullmatch(r"http://([a-z-]+):8000", settings.proxy_url)
        assert host is not None
        service = found("Service", host[1])["spec"]
        assert service["selector"].items() <= pod("ec-router")["metadata"]["labels"].items()
        assert service["publishNotReadyAddresses"] is True
        assert [one["port"] for one in service["ports"]] == [8000]


def secrets_of_readme() -> dict[str, list[str]]:
    """The Secrets that the README makes: name and files of each."""
    text = (KUBERNETES / "README.md").read_text().replace("\\\n", " ")
    made = {}
    for line in re.findall(r"kubectl create secret generic (.*)", text):
        name, *options = shlex.split(line)
        made[name] = [one.removeprefix("--from-file=keys/") for one in options]
    return made


@pytest.mark.parametrize("name", [*ENGINES, "ec-router"])
def test_secrets_as_they_are_mounted(name: str, tmp_path: Path) -> None:
    """The files that the README puts in, behind the links and with the mode a kubelet makes."""
    (volume,) = [v for v in pod(name)["spec"]["volumes"] if "secret" in v]
    (mount,) = [m for m in container(name)["volumeMounts"] if m["name"] == volume["name"]]
    assert (mount["mountPath"], mount["readOnly"]) == (MOUNT, True)
    assert volume["secret"]["defaultMode"] == 0o400
    keys = tmp_path / "keys"
    make_keys(keys)
    (keys / "proxy_token").write_text("0123456789abcdef\n")
    mounted = tmp_path / "mounted"
    hidden = mounted / "..2026_12_01"
    hidden.mkdir(parents=True)
    mounted.chmod(0o3777)  # a kubelet's volumes are, also those mounted read-only
    (mounted / "..data").symlink_to(hidden.name)
    for file in secrets_of_readme()[volume["secret"]["secretName"]]:
        (hidden / file).write_bytes((keys / file).read_bytes())
        (hidden / file).chmod(0o440)  # 0400, and readable by fsGroup
        (mounted / file).symlink_to(f"..data/{file}")
    if name == "ec-router":
        token = parse_options(container(name)["args"]).register_token
        assert load_token("--register-token", token.replace(MOUNT, str(mounted)))
        assert sorted(os.listdir(hidden)) == ["proxy_token"]
        return
    settings = settings_of(container(name)["args"])
    here = {
        key: getattr(settings, key).replace(MOUNT, str(mounted))
        for key in ("curve_keys", "ticket_key", "proxy_token")
    }
    credentials = load_keys(Path(here["curve_keys"]))
    serves = name == "ec-producer"
    assert (credentials.server is not None, credentials.client is not None) == (serves, not serves)
    assert load_tickets(here["ticket_key"]) is not None
    assert load_token("proxy_token", here["proxy_token"]) == "0123456789abcdef"


def test_no_pod_is_more_than_it_needs_to_be() -> None:
    """No root, no capabilities, nothing to write but what is mounted for it, no account's token."""
    for name in (*ENGINES, "ec-router"):
        spec, own = pod(name)["spec"], container(name)["securityContext"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert own["readOnlyRootFilesystem"] is True
        assert own["allowPrivilegeEscalation"] is False


def test_no_key_is_in_the_examples() -> None:
    """Nothing that looks like one: CURVE keys have 40 characters, tokens and tickets 64 digits."""
    for path in EXAMPLES.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            text = path.read_text()
            assert "secret-key" not in text, path
            assert not re.search(r"\b[0-9a-f]{32,}\b", text), path


SERVICE_KEYS = {"build", "command", "deploy", "entrypoint", "healthcheck", "hostname", "image",
                "networks", "ports", "restart", "shm_size", "volumes"}  # fmt: skip
"""Keys of a service in the Compose specification, as far as they are used here."""


def test_compose() -> None:
    """The connector takes each engine's settings, and names are those of services."""
    compose = yaml.safe_load((EXAMPLES / "compose" / "compose.yaml").read_text())
    services = compose["services"]
    # By hand: no kept package brings the schema.
    assert compose.keys() == {"x-engine", "services", "networks", "volumes"}
    for name, service in services.items():
        assert service.keys() <= SERVICE_KEYS, name
        volumes = {volume.partition(":")[0] for volume in service.get("volumes", [])}
        assert volumes <= compose["volumes"].keys()
    roles = {}
    for name in services.keys() - {"router"}:
        command = services[name]["command"]
        config, settings = transfer_config(command), settings_of(command)
        roles[name] = config["ec_role"]
        if config["ec_role"] == "ec_producer":
            assert settings.advertise_host == services[name]["hostname"] == name
            assert (config["ec_ip"], config["ec_port"]) == ("0.0.0.0", 15000)
        else:
            assert settings.allow_peers == ["encode-0:15000", "encode-1:15000"]
        assert "ports" not in services[name]
    options = parse_options(services["router"]["command"])
    for given, role in ((options.encode, "ec_producer"), (options.decode, "ec_consumer")):
        assert {f"http://{name}:8000" for name, one in roles.items() if one == role} == {
            address.url for address in given
        }
    for one in services.values():
        assert (EXAMPLES / "compose" / one["build"]["context"] / "Dockerfile").exists()
        assert set(one["networks"]) <= set(compose["networks"])
