# SPDX-License-Identifier: Apache-2.0
"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# The same examples on each run, and no time limit for one of them: a busy
# machine must not make a test fail. HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("default")
