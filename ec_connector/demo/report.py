# SPDX-License-Identifier: Apache-2.0
"""What the demo shows on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ec_connector.demo.measure import Outcome
from ec_connector.demo.questions import Question
from ec_connector.demo.servers import Server, Servers

WIDTH_WITHOUT_TERMINAL = 132


def console(*, to_stderr: bool) -> Console:
    """Where the demo shows itself; wide enough for its tables where there is no terminal."""
    made = Console(stderr=to_stderr)
    return made if made.is_terminal else Console(stderr=to_stderr, width=WIDTH_WITHOUT_TERMINAL)


def start_shown(console: Console, servers: Servers, starting: Sequence[Server]) -> None:
    """Wait for servers to be healthy with a line of progress for each. Raises ServerError."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        lines: dict[str, TaskID] = {
            server.name: progress.add_task(f"starting {server.name}", total=1.0)
            for server in starting
        }

        def ready(server: Server) -> None:
            progress.update(lines[server.name], completed=1.0, visible=False)
            console.print(f"  {server.name} is ready after {server.healthy_after:.0f} s")

        servers.wait_healthy(starting, on_change=ready)


class Rows:
    """The main table, one row a question, shown as it grows."""

    def __init__(self, title: str, console: Console) -> None:
        self._console = console
        self._with_answers = console.width >= WIDTH_WITHOUT_TERMINAL
        self.table = Table(title=title, title_justify="left")
        self.table.add_column("request")
        for heading in ("tokens\nequal", "encoded by\nproducer", "encoded by\nconsumer"):
            self.table.add_column(heading, justify="right")
        self.table.add_column("bytes\nmoved", justify="right")
        self.table.add_column("fetch to\nready", justify="right")
        if self._with_answers:
            self.table.add_column("first answer")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw the table while it is filled (at the end only, where there is no terminal)."""
        with Live(self.table, console=self._console, refresh_per_second=4):
            yield
        if not self._console.is_terminal:
            self._console.print()  # Live ends without a new line there

    def add(self, question: Question, outcome: Outcome, equal: int) -> None:
        """A row; ``equal`` answers were token by token those of the reference."""
        total = len(question.bodies)
        cells = [
            question.name,
            f"{equal} of {total}",
            str(outcome.encoded_by_producer),
            str(outcome.encoded_by_consumer),
            _bytes(outcome.moved_bytes),
            "-" if outcome.fetch_ms is None else f"{outcome.fetch_ms:.2f} ms",
        ]
        if self._with_answers:
            cells.append(_shortened(outcome.answers[0].text.strip()))
        self.table.add_row(*cells, style="red" if outcome.problems else "")


def first_token_table(times: dict[str, dict[str, float]]) -> Table:
    """Milliseconds to the first token: ``{question: {who: ms}}``, a column for each who."""
    table = Table(title="time to first token (median, ms)", title_justify="left")
    table.add_column("request", no_wrap=True)
    names = list(dict.fromkeys(who for row in times.values() for who in row))
    for who in names:
        table.add_column(who, justify="right")
    for question, row in times.items():
        table.add_row(question, *(f"{row[who]:.1f}" if who in row else "-" for who in names))
    return table


def _bytes(count: int) -> str:
    if count >= 1 << 20:
        return f"{count / (1 << 20):.2f} MiB"
    return f"{count / (1 << 10):.0f} KiB" if count else "0"


def _shortened(text: str, limit: int = 36) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
