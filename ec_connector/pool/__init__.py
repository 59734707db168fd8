# SPDX-License-Identifier: Apache-2.0
"""The pool: its memory (``region``) and who holds which blocks of it (``blocks``)."""
