# SPDX-License-Identifier: Apache-2.0
"""A worker in another process, interpreter or machine that runs graphs for an encoder.

The worker needs Python, numpy, pyzmq and msgspec, never torch or vLLM: an NPU that only one
interpreter can reach, or a Windows host with ONNX Runtime, is enough. Only ``tcp`` is used.

- :class:`ec_connector.stage.caller.Stage` is the side that asks.
- ``python -m ec_connector.stage`` is the worker.
"""
