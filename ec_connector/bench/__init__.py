# SPDX-License-Identifier: Apache-2.0
"""``ec-connector bench``: what a transfer takes here, beside vLLM's in-tree pair and the limits.

Everything is measured in one run and by turns, so that whatever else the
machine does hits all alike. Absolute figures are a machine's; ratios within a
run are what can be compared.
"""
