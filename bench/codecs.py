# SPDX-License-Identifier: Apache-2.0
"""What codecs save and cost: ``python bench/codecs.py [--rows FILE.npy] [--json FILE]``.

Rows of a real vision encoder where one is at hand: the text recogniser of PP-OCRv4, whose
weights the package ``rapidocr-onnxruntime`` ships (a convolutional stem, two transformer
blocks). Its rows are taken behind the last layer norm. For them install, beside this package,
``onnxruntime onnx pillow`` and ``rapidocr-onnxruntime --no-deps``; without, this is said and
left out. ``--rows`` takes your own encoder's rows, an array of float32 ``[rows, width]``.

One thread, runs of 1 MiB as on the wire. "Pays below" is the link on which packing, sending and
unpacking one after the other takes as long as sending the rows as they are. In a transfer of
several runs the three overlap, so it pays on somewhat faster links too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ec_connector.bench.stats import median
from ec_connector.codecs.choice import LOSSY, LZ4, ZSTD
from ec_connector.codecs.work import Packed, pack, unpack

RUN = 1 << 20
REPEATS = 15
WORDS = (
    "Encoder outputs of one image",
    "TOTAL 1 234,56 EUR",
    "The quick brown fox jumps over",
    "Gate B12 boards at 07:45",
    "lease pin extent ack",
    "Rows and columns, 0123456789",
)
Floats = np.ndarray[Any, np.dtype[np.float32]]


def text_lines(count: int) -> Floats:
    """Pictures of printed lines, all different, as the recogniser takes them: [n, 3, 48, 320]."""
    from PIL import Image, ImageDraw, ImageFont

    numbers = np.random.default_rng(0)
    pictures = []
    for index in range(count):
        paper, ink = int(numbers.integers(180, 256)), int(numbers.integers(0, 90))
        picture = Image.new("RGB", (320, 48), (paper, paper - 8, paper - 16))
        font = ImageFont.load_default(int(numbers.integers(16, 30)))
        text = f"{WORDS[index % len(WORDS)]} {index}"
        place = (int(numbers.integers(2, 12)), int(numbers.integers(2, 14)))
        ImageDraw.Draw(picture).text(place, text, (ink, ink, ink + 20), font=font)
        grain = numbers.normal(0, 4, (48, 320, 3))
        pictures.append((np.asarray(picture) + grain).transpose(2, 0, 1))
    return ((np.stack(pictures) / 255 - 0.5) / 0.5).astype(np.float32)


def recogniser_rows() -> Floats | str:
    """Rows of the real encoder, [rows, 120]; in words why there are none."""
    for module in ("onnxruntime", "onnx", "PIL", "rapidocr_onnxruntime"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    import onnx
    import onnxruntime

    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or spec.origin is None:
        return "rapidocr_onnxruntime is not a package with files"
    path = Path(spec.origin).parent / "models" / "ch_PP-OCRv4_rec_infer.onnx"
    model = onnx.load(path)
    # What the last reshape takes is the last layer norm's output, one row a column of the text.
    (*_, last) = (node for node in model.graph.node if node.op_type == "Reshape")
    value = onnx.helper.make_tensor_value_info(last.input[0], onnx.TensorProto.FLOAT, None)
    model.graph.output.append(value)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (rows,) = session.run([last.input[0]], {session.get_inputs()[0].name: text_lines(256)})
    return np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]))


def synthetic_rows(*, channels: bool) -> Floats:
    """Normal rows of 4096; with ``channels`` each has a magnitude of its own, a few a large one."""
    numbers = np.random.default_rng(1)
    rows = numbers.standard_normal((256, 4096), np.float32)
    if channels:
        rows *= np.exp(numbers.normal(0, 0.8, 4096)).astype(np.float32)
        rows[:, numbers.choice(4096, 8, replace=False)] *= 40
    return rows


def as_dtype(rows: Floats, dtype: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The rows' bytes."""
    if dtype == "bfloat16":
        return (rows.view(np.uint32) >> 16).astype("<u2").reshape(-1).view(np.uint8)
    return rows.astype("<f2").reshape(-1).view(np.uint8)


def as_floats(raw: np.ndarray[Any, np.dtype[np.uint8]], dtype: str) -> Floats:
    """The numbers that the bytes say."""
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f2").astype(np.float32)


def seconds(job: Callable[[], Any]) -> float:
    """Median time of a job."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        job()
        times.append(time.perf_counter() - begin)
    return median(times)


def measure(rows: Floats, codec: str, dtype: str) -> dict[str, Any]:
    """One codec on the whole runs of some rows."""
    width = rows.shape[1]
    unit = width * 2
    run = RUN - RUN % unit
    whole = as_dtype(rows, dtype)
    parts = [whole[at : at + run] for at in range(0, whole.nbytes, run)]
    shape = [len(rows), width]

    def packs() -> list[Packed | None]:
        return [pack(codec, part.data, dtype, shape) for part in parts]

    made = packs()
    sizes = [
        part.nbytes if one is None else len(one.data) for part, one in zip(parts, made, strict=True)
    ]

    def unpacks() -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        return [
            part
            if one is None
            else unpack(codec, one.data, one.checksum, part.nbytes, dtype, shape)
            for part, one in zip(parts, made, strict=True)
        ]

    came = as_floats(np.concatenate(unpacks()), dtype).reshape(rows.shape)
    sent = as_floats(whole, dtype).reshape(rows.shape)
    if codec != LOSSY and not (came == sent).all():
        raise AssertionError(f"{codec} changed rows")
    packing, unpacking = seconds(packs), seconds(unpacks)
    saved = whole.nbytes - sum(sizes)
    lengths = np.linalg.norm(sent, axis=1) * np.linalg.norm(came, axis=1)
    return {
        "codec": codec,
        "dtype": dtype,
        "nbytes": whole.nbytes,
        "ratio": whole.nbytes / sum(sizes),
        "pack_MBps": whole.nbytes / packing / 1e6,
        "unpack_MBps": whole.nbytes / unpacking / 1e6,
        "packed_runs": sum(one is not None for one in made),
        "pays_below_MBps": saved / (packing + unpacking) / 1e6,
        "largest_error_of_row": float(
            (np.abs(came - sent).max(axis=1) / np.abs(sent).max(axis=1)).max()
        ),
        "least_cosine": float(((sent * came).sum(axis=1) / lengths).min()),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=Path, help="a .npy file of float32 [rows, width]")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    sources: dict[str, Floats] = {}
    real = recogniser_rows()
    if isinstance(real, str):
        print(f"no rows of a real encoder: {real}", file=sys.stderr)
    else:
        sources["PP-OCRv4 recogniser"] = real
    sources["normal, 4096 wide"] = synthetic_rows(channels=False)
    sources["normal, uneven channels"] = synthetic_rows(channels=True)
    if options.rows:
        with options.rows.open("rb") as file:
            rows = np.lib.format.read_array(file, allow_pickle=False)
        sources[options.rows.name] = np.ascontiguousarray(rows, np.float32)
    results = []
    print("All figures are of one thread. Runs that do not shrink are sent as they are.")
    print("rows | dtype | codec | ratio | pack | unpack (MB/s) | pays below | error, cosine")
    for name, rows in sources.items():
        for dtype in ("bfloat16", "float16"):
            for codec in (ZSTD, LZ4, LOSSY):
                one = {"rows": name, "shape": list(rows.shape), **measure(rows, codec, dtype)}
                results.append(one)
                if not one["packed_runs"]:
                    print(f"{name} | {dtype} | {codec} | does not shrink")
                    continue
                print(
                    f"{name} | {dtype} | {codec} | {one['ratio']:.2f} | {one['pack_MBps']:.0f} | "
                    f"{one['unpack_MBps']:.0f} | {8 * one['pays_below_MBps'] / 1000:.2f} Gbit/s | "
                    f"{one['largest_error_of_row']:.4f}, {one['least_cosine']:.5f}"
                )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
