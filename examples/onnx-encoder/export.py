# SPDX-License-Identifier: Apache-2.0
"""A LLaVA checkpoint's vision tower and projector as one ONNX graph.

``python export.py CHECKPOINT vision.onnx``: takes ``pixel_values`` (images, 3, height, width),
gives ``rows`` (images, rows, width), in float32. Needs torch, transformers, safetensors and onnx.
The graph says of which weights it was made, so that consumers of others refuse its rows.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import onnx
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from ec_connector.engine.checkpoint import weights_digest

OPSET = 17
TOWER = "vision_tower.vision_model."
PROJECTOR = "multi_modal_projector."


class Vision(torch.nn.Module):
    """Pixels to what the language model takes in place of the image's tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder)
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
        self.layer = config.vision_feature_layer
        self.skip = 1 if config.vision_feature_select_strategy == "default" else 0
        # So exported, attention is plain products: no operator that a runtime may lack.
        self.tower = AutoModel.from_config(config.vision_config, attn_implementation="eager")
        width, hidden = config.vision_config.hidden_size, config.text_config.hidden_size
        self.linear_1 = torch.nn.Linear(width, hidden)
        self.linear_2 = torch.nn.Linear(hidden, hidden)
        self._take(self.tower, weights, TOWER)
        for name in ("linear_1", "linear_2"):
            self._take(getattr(self, name), weights, f"{PROJECTOR}{name}.")
        self.float().eval()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        states = self.tower(pixel_values, output_hidden_states=True).hidden_states
        rows = self.linear_1(states[self.layer][:, self.skip :])
        return self.linear_2(torch.nn.functional.gelu(rows))

    @staticmethod
    def _take(module: torch.nn.Module, weights: dict[str, torch.Tensor], prefix: str) -> None:
        mine = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        # Some transformers name the tower's own level once more.
        named = {name if name in module.state_dict() else f"vision_model.{name}": value
                 for name, value in mine.items()}  # fmt: skip
        missing, unknown = module.load_state_dict(named, strict=False)
        missing = [name for name in missing if not name.endswith("position_ids")]
        if missing or unknown:
            raise SystemExit(f"these weights are not those of the model: {missing} {unknown}")


def export(folder: Path, target: Path) -> None:
    """Write the graph."""
    vision = Vision(folder)
    size = vision.tower.config.image_size
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # the exporter speaks of its own successor
        torch.onnx.export(
            vision,
            (torch.zeros(1, 3, size, size),),
            target,
            dynamo=False,
            input_names=["pixel_values"],
            output_names=["rows"],
            dynamic_axes={"pixel_values": {0: "images"}, "rows": {0: "images"}},
            opset_version=OPSET,
        )
    graph = onnx.load(target)
    onnx.helper.set_model_props(graph, {"ec_connector.weights": weights_digest(folder) or ""})
    onnx.save(graph, target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("target", type=Path)
    chosen = parser.parse_args()
    export(chosen.checkpoint, chosen.target)
    print(f"{chosen.target}: {chosen.target.stat().st_size} bytes")
