# SPDX-License-Identifier: Apache-2.0
"""A digest of a checkpoint's files that is cheap and changes when the weights change.

The name of a model says nothing about its weights: a path stays while they are
replaced, and shapes stay while they are trained further. Names, sizes and
headers alone would miss the latter, so a few bytes of every tensor are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Final

_MAX_HEADER: Final = 64 * 1024 * 1024
_MAX_TENSORS: Final = 2048  # per file; beyond that every n-th one is sampled
_SAMPLE: Final = 64
_WINDOWS: Final = 64  # samples of a file that has no safetensors header
_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NOT_WEIGHTS: Final = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt"})


def weights_digest(folder: Path) -> str | None:
    """SHA-256 (32 hex digits) over the weight files of a folder, by name.

    None when it holds none. A folder with safetensors files is judged by those
    alone, as vLLM loads those alone.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _SUFFIXES and path.name not in _NOT_WEIGHTS
    )
    safe = [path for path in files if path.suffix == ".safetensors"]
    files = safe or files
    if not files:
        return None
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        total.update(_file_digest(path))
    return total.hexdigest()[:32]


def _file_digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        spans = _tensor_spans(fd, size, digest) if path.suffix == ".safetensors" else None
        if spans is None:
            step = max(1, size // _WINDOWS)
            spans = [(offset, min(size, offset + step)) for offset in range(0, size, step)]
        for start, end in spans:
            middle = max(start, (start + end) // 2)
            for offset in {start, middle}:
                digest.update(os.pread(fd, min(_SAMPLE, end - offset), offset))
    finally:
        os.close(fd)
    return digest.digest()


def _tensor_spans(fd: int, size: int, digest: hashlib._Hash) -> list[tuple[int, int]] | None:
    """Where the tensors of a safetensors file lie; its header goes into the digest.

    None if the file is not what its name says.
    """
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 0 < length <= min(_MAX_HEADER, size - 8):
        return None
    header = os.pread(fd, length, 8)
    digest.update(header)
    try:
        entries = json.loads(header)
        offsets = sorted(
            tuple(entry["data_offsets"])
            for name, entry in entries.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    stride = -(-len(offsets) // _MAX_TENSORS) or 1
    base = 8 + length
    return [(base + start, base + end) for start, end in offsets[::stride]]
