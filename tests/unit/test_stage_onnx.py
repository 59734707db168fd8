# SPDX-License-Identifier: Apache-2.0
"""A stage's worker with ONNX Runtime itself."""

from __future__ import annotations

import numpy as np
import pytest

from ec_connector.stage.errors import StageError
from ec_connector.stage.process import OwnStage

onnx = pytest.importorskip("onnx", reason="onnx makes the graphs; it is in the test extra")
pytest.importorskip("onnxruntime", reason="onnxruntime is in the extras stage and test")


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """``y = x @ w``, one with sequences, and a file that is none."""
    folder = tmp_path_factory.mktemp("graphs")
    helper, kinds = onnx.helper, onnx.TensorProto
    weights = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32) * 3, "w")
    product = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", kinds.FLOAT, ["rows", 4])],
        [helper.make_tensor_value_info("y", kinds.FLOAT, ["rows", 4])],
        [weights],
    )
    listed = helper.make_graph(
        [helper.make_node("SequenceConstruct", ["x"], ["y"])],
        "listed",
        [helper.make_tensor_value_info("x", kinds.FLOAT, [1])],
        [helper.make_tensor_sequence_value_info("y", kinds.FLOAT, None)],
    )
    versions = {"opset_imports": [helper.make_opsetid("", 17)], "ir_version": 9}
    for graph in (product, listed):
        model = helper.make_model(graph, **versions)
        (folder / graph.name).write_bytes(model.SerializeToString())
    (folder / "none").write_bytes(b"no graph")
    return {name: folder / name for name in ("product", "listed", "none")}


@pytest.fixture
def stage(graphs):
    """A worker of our own."""
    with OwnStage(graphs) as one:
        yield one


def test_run(stage):
    """Placed, and why; results are those of the graph."""
    assert "CPUExecutionProvider" in stage.facts["providers"]
    assert "Azure" not in stage.load("product")["provider"]
    loaded = stage.load("product", ["NoSuchProvider", "CPUExecutionProvider"])
    assert loaded["provider"] == "CPUExecutionProvider"
    assert loaded["device"] == "cpu"
    assert loaded["why"] == "the first available of NoSuchProvider, CPUExecutionProvider"
    assert loaded["inputs"] == [{"name": "x", "dtype": "float32", "shape": [-1, 4]}]
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(stage.run("product", {"x": x})["y"], 3 * x)


def test_what_cannot_be_opened(stage):
    """No graph, no such provider, results that are no tensors: each with its code."""
    for graph, providers, code in (
        ("none", [], "load_failed"),
        ("product", ["NoSuchProvider"], "no_provider"),
        ("listed", [], "load_failed"),
    ):
        with pytest.raises(StageError) as raised:
            stage.load(graph, providers)
        assert raised.value.code == code
