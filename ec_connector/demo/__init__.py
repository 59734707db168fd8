# SPDX-License-Identifier: Apache-2.0
"""The demo: a real producer/consumer pair on tiny models, beside an ordinary vLLM."""
