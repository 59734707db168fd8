# SPDX-License-Identifier: Apache-2.0
"""Which calls of vLLM's workers change what an engine is to its peers, and into what."""

from __future__ import annotations

from typing import Any

import pytest

from ec_connector.engine.weights import Weights, may_change
from ec_connector.protocol.fingerprint import Identity, agree

STARTED = Identity("hash", {"model": "m", "weights": "first"})


class Engine:
    """What an engine tells of itself, with weights on a disk that the test writes."""

    def __init__(self, identity: Identity = STARTED) -> None:
        self.disk: dict[str, str | None] = {"": identity.factors.get("weights")}
        self.told = [identity]
        self.weights = Weights(identity, lambda source: self.disk[source], self.told.append)

    @property
    def identity(self) -> Identity:
        return self.told[-1]

    def call(self, method: Any, *args: Any, **kwargs: Any) -> None:
        self.weights.call_begins(method)
        self.weights.call_succeeded(method, args, kwargs)


def copy_weights_over() -> None:
    """Stands for a function that a trainer has run on the workers."""


@pytest.mark.parametrize(
    "method",
    [
        "reload_weights",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weights_from_ipc_handles",
        "load_new_Weights",
        "apply_model",
        copy_weights_over,
    ],
)
def test_calls_that_may_change_weights(method: Any) -> None:
    """vLLM's own, those of worker extensions by their names, and what runs anything at all."""
    assert may_change(method)


@pytest.mark.parametrize(
    "method",
    ["init_weight_transfer_engine", "compute_weight_checksums", "profile", "encoded_pictures", 7],
)
def test_calls_that_do_not(method: Any) -> None:
    """What is asked of workers all the time must not cost a single transfer."""
    assert not may_change(method)
    engine = Engine()
    engine.call(method)
    assert engine.told == [STARTED]


def test_changed_weights_agree_with_nobody() -> None:
    """Not with the engine of before, nor another that was changed, nor itself after the next."""
    one, two = Engine(), Engine()
    one.call("update_weights")
    assert "weights" not in one.identity.factors
    assert agree(one.identity, STARTED) == (
        "weights_version",
        one.identity.factors["weights_version"],
        "as loaded",
    )
    two.call("update_weights")
    assert agree(one.identity, two.identity) is not None
    before = one.identity
    one.call("update_weights")
    assert agree(before, one.identity) is not None


def test_who_knows_no_weights_is_refused_too() -> None:
    """A checkpoint that could not be read is not compared, but is none that was changed since."""
    unread = Identity("hash", {"model": "m"})
    changed = Engine(unread)
    assert agree(unread, STARTED) is None
    changed.call("reload_weights")
    for other in (unread, STARTED, Identity()):
        assert agree(changed.identity, other) is not None
        assert agree(other, changed.identity) is not None


@pytest.mark.parametrize("by_name", [False, True])
def test_weights_reloaded_from_disk_are_known_by_their_digest(by_name: bool) -> None:
    """While the call runs they are neither; a path stays for the calls after it, as in vLLM."""
    engine = Engine()
    engine.disk["/new"] = "second"
    if by_name:
        engine.call("reload_weights", weights_path="/new")
    else:
        engine.call("reload_weights", None, "/new")
    assert engine.told[1].factors["weights_version"].startswith("changed ")
    assert engine.identity == Identity("hash", {"model": "m", "weights": "second"})
    engine.disk["/new"] = "third"
    engine.call("reload_weights")
    assert engine.identity.factors["weights"] == "third"


def test_the_same_weights_again_change_nothing_in_the_end() -> None:
    """As after a sleep that let them go."""
    engine = Engine()
    engine.call("reload_weights")
    assert engine.identity == STARTED


def test_a_call_that_fails_leaves_the_engine_different() -> None:
    """Some of its tensors may have been replaced."""
    engine = Engine()
    engine.weights.call_begins("reload_weights")
    assert agree(engine.identity, STARTED) is not None


def test_weights_given_by_hand_are_not_those_on_disk() -> None:
    """Only a version can say what they are."""
    engine = Engine()
    engine.call("reload_weights", iter(()))
    assert engine.identity.factors["weights_version"].startswith("changed ")


def test_a_version_names_what_was_transferred() -> None:
    """Both sides got the same weights and the same version; one that lags behind is refused."""
    one, two = Engine(), Engine(Identity("hash", {"model": "m"}))
    for engine in (one, two):
        engine.call("start_weight_update")
        engine.call("update_weights")
        engine.call("finish_weight_update")
        engine.weights.versioned("step-7")
    assert agree(one.identity, two.identity) is None
    one.weights.versioned("step-8")
    assert agree(one.identity, two.identity) == (
        "weights_version",
        "version step-8",
        "version step-7",
    )
    two.call("update_weights")
    assert agree(one.identity, two.identity) is not None


def test_no_version_passes_for_what_was_loaded() -> None:
    """Whatever name an operator picks."""
    engine = Engine(Identity("hash", {"model": "m"}))
    engine.weights.versioned("as loaded")
    assert agree(engine.identity, Identity("hash", {"model": "m"})) is not None
