# SPDX-License-Identifier: Apache-2.0
"""Keeps what one tenant's identifiers stand for apart from another's.

vLLM knows an item by its ``uuid`` alone, from its caches to the encoder cache that travels. A
client who names the ``uuid`` of another tenant's picture would get that picture's encoding. So with
tenants every ``uuid`` is replaced by one that only this tenant can get, before any server sees it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.datastructures import Headers

from ec_connector.proxy.headers import RawHeaders
from ec_connector.proxy.intake import RefusedError
from ec_connector.proxy.rewrite import Body

MAX_TENANT_CHARS = 256


def tenant_of(headers: RawHeaders, header: str) -> str:
    """Whose request it is: what stands in ``header``, which whoever lets clients in has set.

    Raises:
        RefusedError: it is not there once, or too long.
    """
    found = Headers(raw=list(headers)).getlist(header)
    if len(found) != 1 or not 0 < len(found[0]) <= MAX_TENANT_CHARS:
        raise RefusedError(
            400,
            f"the header {header} must name the tenant, once, in 1 to {MAX_TENANT_CHARS} "
            "characters",
        )
    return found[0]


def apart(body: Body, tenant: str) -> Body:
    """A request whose ``uuid`` are this tenant's own, wherever in a message they stand."""
    changed: Body = {
        name: _apart(body[name], tenant) for name in ("messages", "input") if name in body
    }
    return {**body, **changed}


def scoped(tenant: str, text: str) -> str:
    """What ``text`` of this tenant is called; the same for no other tenant and no other text."""
    named = f"{len(tenant)}:{tenant}{text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(named, digest_size=32).hexdigest()


def _apart(value: Any, tenant: str) -> Any:
    if isinstance(value, list):
        return [_apart(one, tenant) for one in value]
    if not isinstance(value, dict):
        return value
    copied = {name: _apart(one, tenant) for name, one in value.items()}
    uuid = copied.get("uuid")
    if uuid is not None:
        copied["uuid"] = scoped(tenant, uuid) if isinstance(uuid, str) else None
    return copied
