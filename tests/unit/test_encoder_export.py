# SPDX-License-Identifier: Apache-2.0
"""The exported tower gives torch's rows; and the encoder's process, with a real processor."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the example exports with torch")
pytest.importorskip("transformers", reason="the example exports a model of transformers")
onnx = pytest.importorskip("onnx", reason="onnx is in the test extra")
pytest.importorskip("onnxruntime", reason="onnxruntime is in the test extra")

from ec_connector.demo.models import make_llava  # noqa: E402
from ec_connector.stage.process import OwnStage  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "onnx-encoder"
TOLERANCE = 1e-4
"""Of rows whose numbers are about 1: products in float32, added up in another order."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The example's module, a checkpoint, and its graph."""
    folder = tmp_path_factory.mktemp("export")
    spec = importlib.util.spec_from_file_location("onnx_encoder_export", EXAMPLE / "export.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    checkpoint = make_llava(folder / "llava")
    module.export(checkpoint, folder / "vision.onnx")
    return module, checkpoint, folder / "vision.onnx"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(200)
def test_rows_are_those_of_torch(exported):
    """Also of two images at once; and the graph names the weights it was made of."""
    module, checkpoint, graph = exported
    pixels = np.random.default_rng(3).standard_normal((2, 3, 224, 224), np.float32)
    with torch.inference_mode():
        expected = module.Vision(checkpoint)(torch.from_numpy(pixels)).numpy()
    assert 0.1 < expected.std() < 10.0
    with OwnStage({"vision": graph}) as stage:
        facts = stage.load("vision")
        rows = stage.run("vision", {"pixel_values": pixels})["rows"]
    assert facts["metadata"]["ec_connector.weights"] == module.weights_digest(checkpoint)
    assert rows.shape == (2, 256, 256)
    assert np.abs(rows - expected).max() < TOLERANCE


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(200)
def test_a_graph_that_does_not_fit_ends_the_start(exported, tmp_path):
    """Status 1, and words that say what to do."""
    _, checkpoint, graph = exported
    model = onnx.load(graph)
    for node in model.graph.node:
        node.input[:] = ["pixels" if name == "pixel_values" else name for name in node.input]
    model.graph.input[0].name = "pixels"
    onnx.save(model, tmp_path / "wrong.onnx")
    command = [sys.executable, "-m", "ec_connector.encoder", "--processor", str(checkpoint)]
    command += ["--graph", str(tmp_path / "wrong.onnx"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1
    assert "takes pixels, but the processor gives pixel_values" in done.stderr
    assert "Traceback" not in done.stderr
