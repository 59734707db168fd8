# SPDX-License-Identifier: Apache-2.0
"""The ``vllm.general_plugins`` entry point: makes the connector known by name.

vLLM calls :func:`register` in each of its processes, sometimes more than once,
whether or not the connector will be used. It therefore only notes a name and a
module path; the connector itself is imported when vLLM asks for it.
"""

from __future__ import annotations

import logging
import os

CONNECTOR_NAME = "ECPoolConnector"
CONNECTOR_MODULE = "ec_connector.connector"
DISABLE_VARIABLE = "EC_CONNECTOR_DISABLE"

logger = logging.getLogger("vllm.ec_connector.plugin")

_registered = False


def register() -> None:
    """Register ``ECPoolConnector`` with vLLM's EC connector factory.

    Does nothing when called again, when ``EC_CONNECTOR_DISABLE=1``, when the
    name is taken already, or when this vLLM has no EC connectors; the last two
    are logged. Never raises: a plugin that cannot help must not stop an engine.
    """
    global _registered
    if _registered or os.environ.get(DISABLE_VARIABLE) == "1":
        return
    try:
        from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

        register_connector = ECConnectorFactory.register_connector
    except Exception as error:  # an old or half-installed vLLM fails in ways of its own
        logger.warning(
            "%s is not available: this vLLM has no EC connector support (%s: %s)",
            CONNECTOR_NAME,
            type(error).__name__,
            error,
        )
        return
    try:
        register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except Exception as error:  # ValueError: taken; anything else: a changed signature
        logger.warning(
            "%s was not registered and vLLM's own entry, if any, is used: %s",
            CONNECTOR_NAME,
            error,
        )
        return
    _registered = True
