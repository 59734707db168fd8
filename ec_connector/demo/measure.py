# SPDX-License-Identifier: Apache-2.0
"""Sends a question to one vLLM or to a producer/consumer pair, and judges what came back."""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ec_connector.demo.chat import Answer, ask, ask_all, picture_parts
from ec_connector.demo.questions import Question
from ec_connector.demo.readings import encoded_pictures, growth, metrics, settled_metrics

FETCHED_BYTES = "vllm:ec_pool_fetched_bytes_total"
FETCHED_ITEMS = "vllm:ec_pool_fetched_items_total"
FETCH_SECONDS = "vllm:ec_pool_fetch_time_seconds_sum"
FETCHES = "vllm:ec_pool_fetch_time_seconds_count"
ANNOUNCED = "vllm:ec_proxy_items_announced_total"
REPLACED = "vllm:ec_proxy_items_replaced_total"


@dataclass(frozen=True)
class Pair:
    """URLs of a producer, a consumer and the router before them."""

    producer: str
    consumer: str
    router: str


@dataclass
class Outcome:
    """What one question cost a pair. ``fetch_ms``: mean from asking for an item to having it."""

    answers: list[Answer]
    encoded_by_producer: int = 0
    encoded_by_consumer: int = 0
    announced: int = 0
    replaced: int = 0
    moved_items: int = 0
    moved_bytes: int = 0
    fetch_ms: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def first_token_ms(self) -> float:
        """Median over the answers, in milliseconds."""
        return first_token_ms(self.answers)


def first_token_ms(answers: Sequence[Answer]) -> float:
    """Median time to the first token in milliseconds."""
    return 1000 * median(answer.first_token for answer in answers)


def answers_of(url: str, question: Question) -> list[Answer]:
    """The answers of one server; a connection that broke is an answer with status 0."""
    try:
        if question.at_once:
            return ask_all(url, question.bodies)
        return [ask(url, body) for body in question.bodies]
    except (OSError, http.client.HTTPException) as error:
        return [Answer(0, error=f"{type(error).__name__}: {error}") for _ in question.bodies]


def run_pair(pair: Pair, question: Question) -> Outcome:
    """Send a question through the router and read what every part of the pair counted."""
    encoded = encoded_pictures(pair.producer), encoded_pictures(pair.consumer)
    consumer, router = metrics(pair.consumer), metrics(pair.router)
    outcome = Outcome(answers_of(pair.router, question))
    after_router = settled_metrics(pair.router)
    outcome.announced = round(growth(router, after_router, ANNOUNCED))
    outcome.replaced = round(growth(router, after_router, REPLACED))
    expected = FETCHED_ITEMS if outcome.announced and question.new_pictures else ""
    after = settled_metrics(pair.consumer, wanted=expected, above=consumer.get(FETCHED_ITEMS, 0.0))
    outcome.encoded_by_producer = encoded_pictures(pair.producer) - encoded[0]
    outcome.encoded_by_consumer = encoded_pictures(pair.consumer) - encoded[1]
    outcome.moved_items = round(growth(consumer, after, FETCHED_ITEMS))
    outcome.moved_bytes = round(growth(consumer, after, FETCHED_BYTES))
    fetches = growth(consumer, after, FETCHES)
    if fetches:
        outcome.fetch_ms = 1000 * growth(consumer, after, FETCH_SECONDS) / fetches
    return outcome


def judge(
    question: Question, reference: Sequence[Answer], outcome: Outcome, *, counts: bool
) -> list[str]:
    """What is wrong with an outcome, in words. ``counts``: the connector counts what it moves."""
    problems = []
    for place, (want, got) in enumerate(zip(reference, outcome.answers, strict=True), 1):
        tokens = question.bodies[place - 1]["max_tokens"]
        if want.status != 200 or len(want.token_ids) != tokens:
            problems.append(f"request {place}: the reference answered {_short(want)}")
        elif got.status != 200:
            problems.append(f"request {place}: the pair answered {_short(got)}")
        elif got.token_ids != want.token_ids:
            problems.append(f"request {place}: {got.text!r} instead of {want.text!r}")
    if outcome.encoded_by_consumer:
        problems.append(f"the consumer encoded {outcome.encoded_by_consumer} pictures itself")
    if outcome.encoded_by_producer != question.new_pictures:
        problems.append(
            f"the producer encoded {outcome.encoded_by_producer} pictures,"
            f" not {question.new_pictures}"
        )
    if counts:
        sent = sum(picture_parts(body) for body in question.bodies)
        if outcome.announced < question.pictures:
            problems.append(f"only {outcome.announced} of {question.pictures} were announced")
        if outcome.moved_items < question.new_pictures:
            problems.append(f"only {outcome.moved_items} of {question.new_pictures} were fetched")
        if question.metadata_only and outcome.replaced != sent:
            problems.append(f"{sent - outcome.replaced} pictures still went to the consumer")
    return problems


def texts_differ(questions: Sequence[Question], answers: Mapping[str, Sequence[Answer]]) -> bool:
    """Whether answers to one prompt with different pictures differ, as a pair's proof needs."""
    seen = [
        tuple(answer.token_ids)
        for question in questions
        if len(question.bodies) > 1
        for answer in answers[question.name]
    ]
    return len(set(seen)) == len(seen)


def _short(answer: Answer) -> str:
    if answer.status == 200:
        return f"{len(answer.token_ids)} tokens"
    return f"status {answer.status}: {answer.error[:200]}"
