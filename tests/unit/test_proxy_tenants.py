# SPDX-License-Identifier: Apache-2.0
"""Tenants: nobody's identifier stands for what another sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="the proxy extra is not installed")
pytest.importorskip("uvicorn", reason="the proxy extra is not installed")
pytest.importorskip("starlette", reason="the proxy extra is not installed")
pytest.importorskip("prometheus_client", reason="the proxy extra is not installed")

from ec_connector.proxy.intake import RefusedError
from ec_connector.proxy.media import OWN, identified
from ec_connector.proxy.tenants import apart, scoped, tenant_of
from tests.router.net import (
    announcing,
    answering,
    entry,
    image,
    network,
    request,
    run,
)  # fmt: skip


def uuids(body: Any) -> list[Any]:
    """All of them, in order."""
    if isinstance(body, list):
        return [one for value in body for one in uuids(value)]
    if not isinstance(body, dict):
        return []
    mine = [body["uuid"]] if "uuid" in body else []
    return mine + [one for name, value in body.items() if name != "uuid" for one in uuids(value)]


@pytest.mark.property
@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_no_two_are_one(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Whatever they are called, also where one name and identifier run into each other."""
    assert (scoped(*one) == scoped(*other)) == (one == other)


def test_names_that_run_into_each_other() -> None:
    """As text they are one."""
    assert len({scoped("a", "bc"), scoped("ab", "c"), scoped("", "abc"), scoped("1:a", "bc")}) == 4


@pytest.mark.parametrize(
    "part",
    [
        {**image("a"), "uuid": "theirs"},
        {"type": "image_url", "image_url": None, "uuid": "theirs"},
        {"type": "image_url", "image_url": {"url": "http://h/a.png"}, "uuid": "theirs"},
        {"type": "input_image", "image_url": "http://h/a.png", "uuid": "theirs"},
        {"type": "odd", "deeper": [{"uuid": "theirs"}]},
        {**image("a"), "uuid": OWN + "theirs"},
    ],
)
@pytest.mark.parametrize("field", ["messages", "input"])
def test_wherever_it_stands(part: dict[str, Any], field: str) -> None:
    """With media, without, nested, and one that claims to be the router's."""
    body = {"model": "m", field: [{"role": "user", "content": [part]}]}
    (mine,), (yours,) = uuids(apart(body, "me")), uuids(apart(body, "you"))
    (theirs,) = uuids(body)
    assert mine == scoped("me", theirs) != yours
    assert theirs not in (mine, yours)
    assert not mine.startswith(OWN)


def test_what_has_none_stays() -> None:
    """Nothing else of a request changes."""
    body = {"model": "m", "uuid": "of the request", "messages": [{"content": "text"}]}
    assert apart(body, "me") == body
    odd = {"messages": [{"content": [{"uuid": 7}, {"uuid": None}]}]}
    assert uuids(apart(odd, "me")) == [None, None]


def test_the_routers_own_are_a_tenants_too() -> None:
    """The same picture is another item for another tenant."""
    body = request(image("a"))
    found = {str(uuids(identified(body, tenant))) for tenant in ("", "me", "you")}
    assert len(found) == 3


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"x-tenant", b"")],
        [(b"x-tenant", b"a"), (b"x-tenant", b"a")],
        [(b"x-tenant", b"a" * 257)],
    ],
)
def test_a_request_that_does_not_say(headers: list[tuple[bytes, bytes]]) -> None:
    """Or says it twice, as where a client smuggles one in beside the gateway's."""
    with pytest.raises(RefusedError, match="X-Tenant must name the tenant, once"):
        tenant_of(headers, "X-Tenant")


def test_at_the_router() -> None:
    """Encoder and decoder see this tenant's identifiers alone; without a tenant nobody is asked."""

    async def test() -> None:
        async with network(
            [announcing({"h": entry(0)})], [answering], tenant_header="X-Tenant"
        ) as net:
            theirs = {**image("a"), "uuid": "theirs"}
            bare = {"type": "image_url", "image_url": None, "uuid": "theirs"}
            async with net.chat(request(theirs)) as response:
                assert response.status == 400
                assert "X-Tenant" in await response.text()
            assert net.encoder.bodies == net.decoder.bodies == []
            for tenant in ("me", "you"):
                for part in (theirs, bare):
                    headers = {"X-Tenant": tenant}
                    async with net.chat(request(part), headers=headers) as response:
                        assert response.status == 200
            seen = [set(uuids(body["messages"])) for body in net.decoder.bodies]
            mine, yours = {scoped("me", "theirs")}, {scoped("you", "theirs")}
            assert seen == [mine, mine, yours, yours]
            assert [set(uuids(body)) for body in net.encoder.bodies] == [mine, yours]

    run(test)
