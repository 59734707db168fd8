# SPDX-License-Identifier: Apache-2.0
"""The requests that the demo sends, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ec_connector.demo.chat import Body, chat_body
from ec_connector.demo.pictures import write_picture

CONCURRENT = 10
IN_TURN = 10
LARGE = (3840, 2160)
PROMPT = "What is in the picture?"


@dataclass(frozen=True)
class Question:
    """One row of the demo: requests sent at once, or one after the other.

    ``new_pictures`` counts those that no server has seen before; ``pictures`` all
    distinct ones. ``metadata_only``: the consumer gets no picture at all.
    """

    name: str
    bodies: tuple[Body, ...]
    pictures: int = 0
    new_pictures: int = 0
    at_once: bool = True
    metadata_only: bool = False


class Album:
    """Picture files, drawn when asked for, each different from all before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drawn = 0

    def photo(self, width: int = 640, height: int = 480, kind: str = "jpeg") -> Path:
        """A new file in the folder."""
        self._drawn += 1
        return write_picture(self._folder, self._drawn, width, height, kind)

    def photos(self, count: int) -> list[Path]:
        """Several new files, JPEG and PNG in turn."""
        return [self.photo(kind="png" if number % 2 else "jpeg") for number in range(count)]


def warm_up(album: Album) -> list[Body]:
    """Requests that make a server do everything once, before anything is measured."""
    return [chat_body([album.photo()], PROMPT), chat_body([], PROMPT)]


def media_questions(album: Album, own: Sequence[Path]) -> list[Question]:
    """The requests whose pictures every server gets; ``own`` are the user's files."""
    first, second, third, twice = album.photos(4)
    large = album.photo(*LARGE)
    at_once, in_turn = album.photos(CONCURRENT), album.photos(IN_TURN)
    questions = [
        Question("one photo", (chat_body([first], PROMPT),), 1, 1),
        Question("two different photos", (chat_body([second, third], "Compare them."),), 2, 2),
        Question("the same photo twice", (chat_body([twice, twice], "Compare them."),), 1, 1),
        # Another text, so that the whole prompt is not simply in the prefix cache.
        Question("the first photo again", (chat_body([first], "What else?"),), 1, 0),
        Question(f"a large photo, {LARGE[0]} x {LARGE[1]}", (chat_body([large], PROMPT),), 1, 1),
        Question("text only", (chat_body([], "Name a river."),)),
        Question("one token only", (chat_body([album.photo()], PROMPT, max_tokens=1),), 1, 1),
        Question(
            f"{CONCURRENT} photos at once",
            tuple(chat_body([photo], PROMPT) for photo in at_once),
            CONCURRENT,
            CONCURRENT,
        ),
        Question(
            f"{IN_TURN} photos in turn",
            tuple(chat_body([photo], PROMPT) for photo in in_turn),
            IN_TURN,
            IN_TURN,
            at_once=False,
        ),
    ]
    questions += [Question(path.name, (chat_body([path], PROMPT),), 1, 1) for path in own]
    return questions


def metadata_questions(album: Album, own: Sequence[Path]) -> list[Question]:
    """The requests that reach the consumer as metadata, without a picture."""
    one, second, third = album.photos(3)
    large = album.photo(*LARGE)
    sets = {
        "one photo": ([one], PROMPT),
        "two different photos": ([second, third], "Compare them."),
        "the first photo again": ([one], "What else?"),
        f"a large photo, {LARGE[0]} x {LARGE[1]}": ([large], PROMPT),
        **{path.name: ([path], PROMPT) for path in own},
    }
    return [
        Question(
            name,
            (chat_body(photos, text),),
            pictures=len(photos),
            new_pictures=0 if "again" in name else len(photos),
            metadata_only=True,
        )
        for name, (photos, text) in sets.items()
    ]
