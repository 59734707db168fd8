# SPDX-License-Identifier: Apache-2.0
"""vLLM's side of the connector: what runs inside an engine's processes."""
