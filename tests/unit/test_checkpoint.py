# SPDX-License-Identifier: Apache-2.0
"""The weights' digest: equal for equal files, different for different weights, quick."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ec_connector.engine.checkpoint import weights_digest


def write(folder: Path, seed: int, name: str = "model.safetensors", tensors: int = 3) -> None:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(seed)
    data, header = b"", {}
    for number in range(tensors):
        raw = rng.standard_normal(1000).astype(np.float32).tobytes()
        header[f"t{number}"] = {
            "dtype": "F32",
            "shape": [1000],
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    head = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (folder / name).write_bytes(len(head).to_bytes(8, "little") + head + data)


def test_equal_files_have_equal_digests(tmp_path: Path) -> None:
    """Two copies of a checkpoint are the same weights."""
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 1)
    assert weights_digest(tmp_path / "a") == weights_digest(tmp_path / "b")


def test_other_values_of_the_same_shape_are_noticed(tmp_path: Path) -> None:
    """Names, sizes and headers are equal, and yet the digest differs."""
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 2)
    assert weights_digest(tmp_path / "a") != weights_digest(tmp_path / "b")


def test_one_changed_tensor_is_noticed(tmp_path: Path) -> None:
    """Training that touched one tensor only changes the digest."""
    write(tmp_path / "a", 1)
    before = weights_digest(tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-4000:] = b"\x01" * 4000
    path.write_bytes(raw)
    assert weights_digest(tmp_path / "a") != before


def test_the_folders_name_and_other_files_do_not_matter(tmp_path: Path) -> None:
    """A tokenizer, a log or an old format beside safetensors files changes nothing."""
    write(tmp_path / "a", 1)
    before = weights_digest(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    (tmp_path / "a" / "pytorch_model.bin").write_bytes(b"x" * 100)
    assert weights_digest(tmp_path / "a") == before


def test_other_formats_are_sampled(tmp_path: Path) -> None:
    """A pickle is not parsed, but its content counts."""
    tmp_path.joinpath("pytorch_model.bin").write_bytes(b"a" * 100_000)
    one = weights_digest(tmp_path)
    tmp_path.joinpath("pytorch_model.bin").write_bytes(b"b" * 100_000)
    assert one is not None
    assert weights_digest(tmp_path) != one


def test_a_damaged_header_is_no_error(tmp_path: Path) -> None:
    """A file that only claims to be safetensors is sampled like any other."""
    path = tmp_path / "model.safetensors"
    for raw in (b"", b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]" + b"x" * 50):
        path.write_bytes(raw)
        assert weights_digest(tmp_path) is not None


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    """Nothing is known, so nothing is compared."""
    assert weights_digest(tmp_path) is None
