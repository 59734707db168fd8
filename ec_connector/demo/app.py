# SPDX-License-Identifier: Apache-2.0
"""The demo's course: three sets of servers, one after the other, never more than three engines.

1. LLaVA: an ordinary vLLM, and a producer and a consumer joined by ECPoolConnector.
2. Qwen2-VL: the same, with a router that sends the consumer metadata instead of pictures.
3. LLaVA: a producer and a consumer joined by vLLM's ECExampleConnector, for comparison.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from ec_connector.demo import report
from ec_connector.demo.chat import Answer
from ec_connector.demo.crew import CONSUMER, PRODUCER, Crew, pair_of, shared_folder, warm
from ec_connector.demo.measure import (
    Outcome,
    Pair,
    answers_of,
    first_token_ms,
    judge,
    run_pair,
    texts_differ,
)
from ec_connector.demo.models import make_llava, make_qwen2_vl
from ec_connector.demo.questions import (
    Album,
    Question,
    media_questions,
    metadata_questions,
    warm_up,
)
from ec_connector.demo.servers import ServerError, Servers

OURS, IN_TREE, SINGLE = "ECPoolConnector", "ECExampleConnector", "single vLLM"


@dataclass
class Result:
    """All that the demo found out."""

    outcomes: dict[str, dict[str, Outcome]] = field(default_factory=dict)
    first_token: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run(options: argparse.Namespace) -> int:
    """Run the demo; returns 0 when every answer was right, 1 when anything was off."""
    console = report.console(to_stderr=options.json)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    started = time.monotonic()
    result = Result()
    servers = Servers(options.keep)
    try:
        _run(servers, console, options.image, result)
    except ServerError as error:
        result.problems.append(str(error))
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        # A second Ctrl-C must not interrupt the cleaning up.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        servers.close()
    result.problems += [f"left behind: {what}" for what in servers.leftovers]
    result.seconds = time.monotonic() - started
    if options.json:
        print(json.dumps(_plain(result), indent=2))
    _verdict(console, result)
    return 1 if result.problems else 0


def _run(servers: Servers, console: Console, own: Sequence[Path], result: Result) -> None:
    crew = Crew(servers, console)
    pictures = servers.folder / "pictures"
    pictures.mkdir()
    album = Album(pictures)
    llava = make_llava(servers.folder / "tiny-llava")
    qwen = make_qwen2_vl(servers.folder / "tiny-qwen2-vl")
    console.print(f"made tiny LLaVA and Qwen2-VL checkpoints in {servers.folder}")

    questions = media_questions(album, own)
    reference = _ours(crew, console, llava, album, questions, result, "LLaVA")
    asked = metadata_questions(album, own)
    _ours(crew, console, qwen, album, asked, result, "Qwen2-VL, metadata only", "--metadata-only")
    in_tree = _in_tree(crew, console, llava, album, questions, reference, servers.folder, result)
    for question in questions:
        result.first_token[question.name] = {
            SINGLE: first_token_ms(reference[question.name]),
            IN_TREE: in_tree[question.name].first_token_ms,
            OURS: result.outcomes["LLaVA"][question.name].first_token_ms,
        }
    console.print(report.first_token_table(result.first_token))


def _ours(
    crew: Crew,
    console: Console,
    model: Path,
    album: Album,
    questions: Sequence[Question],
    result: Result,
    title: str,
    *router_options: str,
) -> dict[str, list[Answer]]:
    """One set: an ordinary vLLM and our pair, on the same questions. Returns the reference."""
    console.print(f"[bold]{title}[/bold]: an ordinary vLLM, and a producer and a consumer")
    alone = crew.vllm("reference", model)
    producer = crew.vllm("producer", model, PRODUCER)
    consumer = crew.vllm("consumer", model, CONSUMER)
    router = crew.router(producer, consumer, *router_options)
    crew.wait(alone, producer, consumer, router)
    warm(warm_up(album), alone, router)
    reference = {question.name: answers_of(alone.url, question) for question in questions}
    if not texts_differ(questions, reference):
        result.problems.append(f"{title}: different pictures gave the same text")
    rows = report.Rows(title, console)
    outcomes = result.outcomes[title] = {}
    pair = pair_of(producer, consumer, router)
    with rows.shown():
        for question in questions:
            want = reference[question.name]
            outcome = outcomes[question.name] = _measured(pair, question, want, counts=True)
            equal = [a.token_ids == b.token_ids for a, b in zip(want, outcome.answers, strict=True)]
            rows.add(question, outcome, sum(equal))
            result.problems += [f"{title}, {question.name}: {one}" for one in outcome.problems]
    if any(outcome.problems for outcome in outcomes.values()):
        console.print(producer.tail(), consumer.tail(), markup=False, highlight=False)
    crew.stop(alone, producer, consumer, router)
    return reference


def _in_tree(
    crew: Crew,
    console: Console,
    model: Path,
    album: Album,
    questions: Sequence[Question],
    reference: dict[str, list[Answer]],
    folder: Path,
    result: Result,
) -> dict[str, Outcome]:
    """The in-tree pair on the same questions; what is wrong with it is a note, not our problem."""
    console.print(f"[bold]{IN_TREE}[/bold] (shared folder), for comparison")
    store = folder / "shared"
    store.mkdir()
    producer = crew.vllm("producer", model, shared_folder("ec_producer", store))
    consumer = crew.vllm("consumer", model, shared_folder("ec_consumer", store))
    router = crew.router(producer, consumer)
    crew.wait(producer, consumer, router)
    warm(warm_up(album), router)
    pair, outcomes = pair_of(producer, consumer, router), {}
    for question in questions:
        want = reference[question.name]
        outcome = outcomes[question.name] = _measured(pair, question, want, counts=False)
        result.notes += [f"{IN_TREE}, {question.name}: {one}" for one in outcome.problems]
    crew.stop(producer, consumer, router)
    return outcomes


def _measured(
    pair: Pair, question: Question, reference: Sequence[Answer], *, counts: bool
) -> Outcome:
    outcome = run_pair(pair, question)
    outcome.problems = judge(question, reference, outcome, counts=counts)
    return outcome


def _verdict(console: Console, result: Result) -> None:
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    for problem in result.problems:
        console.print(f"wrong: {problem}", style="red", markup=False)
    if result.problems:
        console.print(f"[bold red]{len(result.problems)} problems[/] ({result.seconds:.0f} s)")
        return
    console.print(
        f"[bold green]all equal to the ordinary vLLM, no picture encoded by a consumer, nothing"
        f" left behind[/] ({result.seconds:.0f} s)"
    )


def _plain(result: Result) -> dict[str, Any]:
    """The result as JSON data."""
    return {
        "good": not result.problems,
        "seconds": round(result.seconds, 1),
        "problems": result.problems,
        "notes": result.notes,
        "first_token_ms": result.first_token,
        "requests": {
            title: {
                name: {
                    "encoded_by_producer": outcome.encoded_by_producer,
                    "encoded_by_consumer": outcome.encoded_by_consumer,
                    "announced": outcome.announced,
                    "moved_items": outcome.moved_items,
                    "moved_bytes": outcome.moved_bytes,
                    "fetch_ms": outcome.fetch_ms,
                    "first_token_ms": outcome.first_token_ms,
                    "texts": [answer.text for answer in outcome.answers],
                    "problems": outcome.problems,
                }
                for name, outcome in outcomes.items()
            }
            for title, outcomes in result.outcomes.items()
        },
    }


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)
