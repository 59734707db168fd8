# SPDX-License-Identifier: Apache-2.0
"""Puts the encoder together and runs it."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from pathlib import Path

import uvicorn
from PIL import Image

from ec_connector.encoder.app import Encoder, build_app
from ec_connector.encoder.identifiers import find_hasher
from ec_connector.encoder.identity import choose_dtype, factors, read_config
from ec_connector.encoder.options import Options
from ec_connector.encoder.vision import Vision, load_processor
from ec_connector.errors import ECConnectorError
from ec_connector.library import Producer
from ec_connector.proxy.serve import listen
from ec_connector.stage.caller import Stage
from ec_connector.stage.process import OwnStage

logger = logging.getLogger("vllm.ec_connector.encoder")

_OWN = "vision"
_TRIAL = (640, 480)


def serve(options: Options) -> int:
    """Serve until SIGINT or SIGTERM. Returns 0, or 1 when something needed is not to be had."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        try:
            listener = stack.enter_context(listen(options.host, options.port))
            encoder = _build(options, stack)
        except (ECConnectorError, OSError) as error:
            logger.error("cannot serve: %s", error)
            return 1
        host, port = listener.getsockname()[:2]
        peer_host, peer_port = encoder.producer.address
        logger.info(
            "encoder of %s on http://%s:%d, rows from %s:%d",
            options.model, f"[{host}]" if ":" in host else host, port, peer_host, peer_port,
        )  # fmt: skip
        application = build_app(encoder, options.max_body)
        config = uvicorn.Config(
            application, log_config=None, access_log=False, log_level="warning",
            timeout_graceful_shutdown=5,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listener])
    return 0


def _build(options: Options, stack: contextlib.ExitStack) -> Encoder:
    hasher = find_hasher(options.hasher)
    config = read_config(options.processor)
    dtype = choose_dtype(options.dtype, config)
    name = _OWN if options.own_worker else options.graph
    vision = Vision(
        load_processor(options.processor),
        lambda: _start_stage(options),
        name,
        dtype,
        options.stage_timeout,
    )
    stack.callback(vision.close)
    # Once before anybody asks: a graph that does not fit this processor is told now.
    rows = vision.encode(Image.new("RGB", _TRIAL, (127, 127, 127)))
    logger.info(
        "graph %s on %s by %s (%s); a picture of %d x %d gives %d rows of %d",
        options.graph, vision.facts["device"], vision.facts["provider"], vision.facts["why"],
        *_TRIAL, *rows.shape,
    )  # fmt: skip
    known = factors(
        options.model, dtype, rows.shape[1], config, options.processor, vision.facts["metadata"]
    )
    producer = stack.enter_context(Producer(factors=known, **options.settings))
    return Encoder(vision, producer, options.model, dtype, hasher)


def _start_stage(options: Options) -> Stage:
    if options.own_worker:
        return OwnStage(
            {_OWN: Path(options.graph)},
            python=[options.stage_python or sys.executable],
            runtime=options.stage_runtime,
            payload_limit=options.payload_limit,
        )
    stage = Stage(
        connect=options.stage_connect,
        listen=options.stage_listen,
        payload_limit=options.payload_limit,
        curve_keys=options.stage_keys,
    )
    try:
        facts = stage.hello(options.stage_timeout)
    except BaseException:
        stage.close()
        raise
    logger.info("worker %s on %s, Python %s", facts["pid"], facts["platform"], facts["python"])
    return stage
