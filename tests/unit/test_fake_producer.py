# SPDX-License-Identifier: Apache-2.0
"""The fixture as another project finds it: installed, and named in a test, nothing more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OTHER_PROJECT = """
import numpy as np
import pytest
from ec_connector import Consumer
from ec_connector.errors import FetchError

def test_with_a_producer(fake_producer):
    rows = np.ones((4, 8), np.float32)
    announcement = fake_producer.put("an image", rows)
    with Consumer(pool_size="8MiB") as consumer:
        assert (consumer.fetch("an image", announcement) == rows).all()
        fake_producer.kill()
        with pytest.raises(FetchError):
            consumer.fetch("another", announcement, timeout=1.0)
        fake_producer.recover()
        assert (consumer.fetch("new", fake_producer.put("new", rows)) == rows).all()
"""


def test_another_project_uses_it(tmp_path: Path) -> None:
    """A real agent behind real sockets, found by pytest alone."""
    (tmp_path / "test_theirs.py").write_text(OTHER_PROJECT)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
