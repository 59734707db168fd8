# SPDX-License-Identifier: Apache-2.0
"""A LLaVA's vision tower in ONNX Runtime as an encoder instance, asked as a router asks.

    python examples/onnx-encoder/run.py [CHECKPOINT]

Without a checkpoint a tiny one is made, with random weights. Needs torch and transformers for
the export, and ``pip install 'ec-connector[encode-server]' onnx``. No vLLM runs here: it prints
how one is started that takes the rows.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from io import BytesIO
from pathlib import Path

from PIL import Image

from ec_connector import Consumer
from ec_connector.demo.models import make_llava
from ec_connector.proxy.serve import listen

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0


def picture_request() -> dict[str, object]:
    """A chat request with a picture, as a router sends it to an encoder."""
    file = BytesIO()
    Image.linear_gradient("L").convert("RGB").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def wait_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    """Until the server answers."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2.0):
                return
        except OSError:
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit("the encoder did not start; its own words are above") from None
            time.sleep(0.2)


def encode(checkpoint: Path, graph: Path) -> None:
    """Serve the graph, have a picture encoded, and fetch its rows as a consumer does."""
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
    options = ["--graph", str(graph), "--processor", str(checkpoint), "--port", str(port)]
    options += ["--config", '{"pool_size": "64MiB"}']
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "ec_connector.encoder", *options])
    try:
        wait_healthy(server, url)
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(picture_request()).encode()
        )
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            params = json.load(answer)["ec_transfer_params"]
        print(json.dumps(params, indent=2))
        with Consumer(factors={"model": str(checkpoint)}, pool_size="64MiB") as consumer:
            for key, entry in params.items():
                rows = consumer.fetch(key, entry, timeout=10.0)
                print(f"fetched {key[:12]}...: {rows.shape[0]} rows of {rows.shape[1]}")
    finally:
        server.terminate()
        server.wait(20.0)


def main() -> None:
    """Export, serve, ask, fetch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a LLaVA with a CLIP tower")
    given = parser.parse_args().checkpoint
    with tempfile.TemporaryDirectory(prefix="onnx-encoder-") as folder:
        checkpoint = given.resolve() if given else make_llava(Path(folder) / "tiny-llava")
        graph = Path(folder) / "vision.onnx"
        export = [sys.executable, str(HERE / "export.py"), str(checkpoint), str(graph)]
        subprocess.run(export, check=True, env=os.environ)
        encode(checkpoint, graph)
    print("A vLLM that takes such rows, and a router before both:")
    ec = '{"ec_connector": "ECPoolConnector", "ec_role": "ec_consumer"}'
    print(f"  vllm serve {checkpoint} --port 8102 --ec-transfer-config '{ec}'")
    print("  ec-connector proxy --encode http://ENCODER:PORT --decode http://127.0.0.1:8102")


if __name__ == "__main__":
    main()
