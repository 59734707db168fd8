# SPDX-License-Identifier: Apache-2.0
"""Time to the first token: one ordinary vLLM beside the router with an encoder and a decoder.

    python bench/first_token.py [ROUNDS]

Tiny models that the demo makes, pictures of 640 x 480 that no server has seen, one request at a
time, the two in turn. Needs vLLM and the extras of the demo.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console

from ec_connector.demo.chat import ask, chat_body
from ec_connector.demo.crew import CONSUMER, PRODUCER, Crew
from ec_connector.demo.models import make_llava, make_qwen2_vl
from ec_connector.demo.questions import PROMPT, Album
from ec_connector.demo.servers import Servers

PICTURES = (1, 8)
MODELS = {"pixels to both": make_llava, "metadata for the decoder": make_qwen2_vl}


def main(rounds: int = 15) -> None:
    """Print the medians, in milliseconds."""
    with tempfile.TemporaryDirectory() as name, Servers() as servers:
        album, console = Album(Path(name)), Console(stderr=True)
        for title, make in MODELS.items():
            crew = Crew(servers, console)
            model = make(Path(name) / make.__name__)
            alone = crew.vllm("alone", model)
            encoder = crew.vllm("encoder", model, PRODUCER)
            decoder = crew.vllm("decoder", model, CONSUMER)
            router = crew.router(encoder, decoder)
            crew.wait(alone, encoder, decoder, router)
            for count in PICTURES:
                times: dict[str, list[float]] = {"one vLLM": [], "router": []}
                for turn in range(rounds + 1):
                    for who, server in (("one vLLM", alone), ("router", router)):
                        body = chat_body(album.photos(count), PROMPT, max_tokens=4)
                        answer = ask(server.url, body)
                        if answer.status != 200:
                            raise SystemExit(f"{who} answers {answer.status}: {answer.error}")
                        if turn:  # the first warms it up
                            times[who].append(answer.first_token * 1000)
                shown = ", ".join(f"{who} {median(ms):.0f} ms" for who, ms in times.items())
                print(f"{title}, {count} pictures: {shown}", flush=True)
            crew.stop(alone, encoder, decoder, router)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
