# SPDX-License-Identifier: Apache-2.0
"""Whether the pool's books agree with each other, for tests and for a doubtful moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ec_connector.errors import InternalError
from ec_connector.pool.entry import Entry, EntryState


@dataclass(slots=True, frozen=True)
class Books:
    """Everything a pool keeps. Entries by generation, but ``found`` by key.

    ``saving`` is by owner and step first, ``pinned`` by session first.
    """

    num_blocks: int
    block_bytes: int
    free_runs: list[tuple[int, int]]
    held: Mapping[int, Entry]
    found: Mapping[str, Entry]
    saving: Mapping[bytes, Mapping[int, Mapping[int, Entry]]]
    pinned: Mapping[str, Mapping[int, Entry]]
    evictable: Mapping[int, Entry]
    saving_blocks: int
    pinned_blocks: int
    evictable_blocks: int
    told: Callable[[str], str]


def audit(books: Books) -> None:
    """Raises InternalError, naming what is wrong, unless every invariant holds."""
    _each_block_once(books)
    for generation, entry in books.held.items():
        if generation != entry.generation or generation < 1:
            raise InternalError(f"{entry.key!r} is held as {generation}, it is {entry.generation}")
        _entry_is_sound(books, entry)
    for key, entry in books.found.items():
        if entry.key != key or books.held.get(entry.generation) is not entry:
            raise InternalError(f"{key!r} is findable but holds no blocks\n{books.told(key)}")
    _indexes_are_right(books)


def _each_block_once(books: Books) -> None:
    runs = [(start, count, "free") for start, count in books.free_runs]
    for entry in books.held.values():
        runs += [(start, count, f"{entry.key!r}") for start, count in entry.extents]
    position, before = 0, "the start"
    for start, count, whose in sorted(runs):
        if start != position or count < 1:
            fault = "a block is held twice" if start < position else "blocks are lost"
            raise InternalError(
                f"{fault}: {whose} has {count} at {start}, {before} ended at {position}"
            )
        position, before = start + count, whose
    if position != books.num_blocks:
        raise InternalError(f"blocks from {position} to {books.num_blocks} are lost")


def _entry_is_sound(books: Books, entry: Entry) -> None:
    fault = ""
    if entry.findable != (books.found.get(entry.key) is entry):
        fault = f"findable={entry.findable} is not so"
    elif entry.blocks != max(1, -(-entry.nbytes // books.block_bytes)):
        fault = f"{entry.nbytes} bytes in {entry.blocks} blocks of {books.block_bytes}"
    elif bool(entry.pins) != (entry.state in (EntryState.PINNED, EntryState.DROPPED)):
        fault = f"{len(entry.pins)} pins in state {entry.state.value!r}"
    elif entry.state is EntryState.FREE:
        fault = "free, yet it holds blocks"
    if fault:
        raise InternalError(f"{entry.key!r}: {fault}\n{books.told(entry.key)}")


def _indexes_are_right(books: Books) -> None:
    held = books.held.values()
    saving = [
        (owner, step, entry.generation)
        for owner, steps in books.saving.items()
        for step, entries in steps.items()
        for entry in entries.values()
    ]
    _same(
        "saving",
        saving,
        [(e.owner, e.step, e.generation) for e in held if e.saving],
    )
    _same(
        "pins",
        [(session, generation) for session, of in books.pinned.items() for generation in of],
        [(session, entry.generation) for entry in held for session in entry.pins],
    )
    idle = [e for e in held if e.ready and not e.pins]
    _same("evictable", list(books.evictable), [entry.generation for entry in idle])
    saved = _blocks(e for e in held if e.saving)
    _same("blocks being saved", [books.saving_blocks], [saved])
    _same("blocks pinned", [books.pinned_blocks], [_blocks(e for e in held if e.pins)])
    _same("blocks evictable", [books.evictable_blocks], [_blocks(idle)])
    if not all(steps and all(steps.values()) for steps in books.saving.values()):
        raise InternalError("an owner or a step without reservations is kept")
    if not all(books.pinned.values()):
        raise InternalError("a session without pins is kept")


def _same(what: str, indexed: list[Any], true: list[Any]) -> None:
    if sorted(indexed) != sorted(true):
        raise InternalError(f"{what}: the index says {indexed}, the entries say {true}")


def _blocks(entries: Iterable[Entry]) -> int:
    return sum(entry.blocks for entry in entries)
