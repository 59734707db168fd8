# SPDX-License-Identifier: Apache-2.0
"""The compatibility hash and the factors beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ec_connector.errors import ConfigError
from ec_connector.protocol.fingerprint import (
    MAX_FACTOR_CHARS,
    compute_ec_compatibility_hash,
    first_difference,
    short_digest,
    usable_factors,
)

KNOWN = ("0.32.0", "acme/tiny-vl", "torch.bfloat16", 8192)


def test_known_hash() -> None:
    """The hash is the in-tree one, to the letter."""
    assert (
        compute_ec_compatibility_hash(*KNOWN)
        == "71a0470cd882f7e3b8b5e888c26a538d55a2b07de2aa6711415ddbd25008d44b"
    )


@pytest.mark.parametrize("position", range(4))
def test_each_factor_counts(position: int) -> None:
    """Changing any one of the four factors changes the hash."""
    other = [*KNOWN]
    other[position] = 4096 if position == 3 else f"{other[position]}x"
    assert compute_ec_compatibility_hash(*other) != compute_ec_compatibility_hash(*KNOWN)


def test_first_difference_names_the_same_factor_on_both_sides() -> None:
    """Of several differences the first by name is given, whoever asks."""
    mine = {"weights": "a", "model": "m", "dtype": "bfloat16"}
    theirs = {"dtype": "float16", "model": "m", "weights": "b"}
    assert first_difference(mine, theirs) == ("dtype", "bfloat16", "float16")
    assert first_difference(theirs, mine) == ("dtype", "float16", "bfloat16")


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [({}, {}), ({"model": "m"}, {}), ({"model": "m"}, {"weights": "w"}), ({"a": ""}, {"a": ""})],
)
def test_what_one_side_does_not_know_is_not_compared(
    mine: dict[str, str], theirs: dict[str, str]
) -> None:
    """Only factors that both sides name can differ."""
    assert first_difference(mine, theirs) is None


def test_silence_about_the_version_of_the_weights_says_as_loaded() -> None:
    """An engine whose weights were changed must differ from one that never heard of that."""
    assert first_difference({"weights_version": "version 7"}, {}) == (
        "weights_version",
        "version 7",
        "as loaded",
    )
    assert first_difference({}, {"weights_version": "as loaded"}) is None


def test_an_empty_value_is_a_value() -> None:
    """A factor that is known and empty differs from one that is not."""
    assert first_difference({"a": ""}, {"a": "1"}) == ("a", "", "1")


def test_short_values_stay_readable() -> None:
    """An operator can read a short factor in the message that names it."""
    assert short_digest("bfloat16") == "bfloat16"
    assert short_digest({"max_pixels": 784}) == '{"max_pixels":784}'
    assert short_digest(None) == "null"


def test_long_values_become_digests() -> None:
    """A long factor has a bounded length, and two that differ at the end still differ."""
    one, other = short_digest("x" * 1000 + "1"), short_digest("x" * 1000 + "2")
    assert one.startswith("sha256:")
    assert len(one) <= MAX_FACTOR_CHARS
    assert one != other


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.property
@given(st.dictionaries(st.text(), JSON))
def test_order_of_keys_does_not_matter(value: dict[str, object]) -> None:
    """Two servers given the same options in another order have the same factor."""
    turned = dict(reversed(value.items()))
    assert short_digest(turned) == short_digest(value)
    assert len(short_digest(value)) <= MAX_FACTOR_CHARS


def test_values_without_a_stable_text_are_refused() -> None:
    """An object whose text may hold an address would never match on the other side."""
    with pytest.raises(TypeError):
        short_digest({"processor": object()})


def test_usable_factors() -> None:
    """Text as it is, other JSON values in their one form, long ones by their digest."""
    assert usable_factors({"model": "m", "layers": 12, "sizes": {"b": 1, "a": [2]}}) == {
        "model": "m",
        "layers": "12",
        "sizes": '{"a":[2],"b":1}',
    }
    assert usable_factors({"long": "x" * 1000})["long"] == short_digest("x" * 1000)
    assert len(usable_factors({f"f{number}": 1 for number in range(32)})) == 32


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({f"f{number}": 1 for number in range(33)}, "33 factors"),
        ({"n" * 65: 1}, "1 to 64 characters"),
        ({"": 1}, "1 to 64 characters"),
        ({"model": object()}, "'model'"),
        ({"bro\ud800ken": "x"}, "cannot be sent"),
        ({"model": "bro\ud800ken"}, "cannot be sent"),
        ({"model": "bro\ud800ken" * 100}, "cannot be sent"),
    ],
)
def test_unusable_factors(factors: dict[str, object], words: str) -> None:
    """Refused at the start, not at the first request, and by name."""
    with pytest.raises(ConfigError, match=words):
        usable_factors(factors)
