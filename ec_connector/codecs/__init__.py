# SPDX-License-Identifier: Apache-2.0
"""Smaller payload for slow links: which ways there are, who may use which, and the arithmetic.

``choice`` knows names and rules (no numpy), ``work`` turns bytes into fewer and back.
Nothing here knows sockets, threads or the pool.
"""
