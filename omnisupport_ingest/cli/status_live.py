"""``status --watch``: shows the same view repeatedly, in place in a terminal, one below the other on a
pipe."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import UTC, datetime
from typing import Any

import click

from omnisupport_ingest.cli.status_health import logs_in
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.errors import IngestError

Document = dict[str, Any]


def watch(
    look: Callable[[], Document], show: Callable[[Document], None], seconds: float, *, as_json: bool
) -> None:
    """Show the result of ``look`` every ``seconds`` until Ctrl-C. A failed look is shown, and tried again.

    ``show`` prints a document. With ``as_json`` each look is one line of JSON.
    """
    wal = WalGrowth()
    with stop_on_signal() as stop, _screen(as_json=as_json) as paint:
        while True:
            began = time.monotonic()
            try:
                document = wal.with_rates(look())
                paint(json.dumps(document, ensure_ascii=False) if as_json else _text(show, document, seconds))
            except IngestError as error:
                # A home that is being made or moved may come back.
                paint(json.dumps({"error": error.problem}) if as_json else str(error))
            if stop.wait(max(0.1, seconds - (time.monotonic() - began))):
                return


class WalGrowth:
    """The growth of the WAL that each slot keeps, from look to look, and so the time until its limit."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}

    def with_rates(self, document: Document, now: float | None = None) -> Document:
        """Return ``document`` with ``bytes_per_second`` and ``seconds_left`` in its slots; None if unknown.

        ``now``: seconds of a monotonic clock.
        """
        at = time.monotonic() if now is None else now
        for log in logs_in(document):
            slot = log["slot"]
            kept, safe = slot["retained_bytes"], slot["safe_bytes"]
            before = self._seen.get(log["name"])
            slot["bytes_per_second"] = slot["seconds_left"] = None
            if kept is None:
                self._seen.pop(log["name"], None)
                continue
            if before is not None and at > before[0]:
                rate = (kept - before[1]) / (at - before[0])
                slot["bytes_per_second"] = round(rate)
                if safe is not None and rate > 0:
                    slot["seconds_left"] = round(safe / rate)
            self._seen[log["name"]] = (at, kept)
        return document


def _text(show: Callable[[Document], None], document: Document, seconds: float) -> str:
    """Return what ``show`` prints, below a line that shows that the view is alive."""
    written = io.StringIO()
    with redirect_stdout(written):
        show(document)
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"{now}, every {seconds:g} s; Ctrl-C ends\n\n{written.getvalue()}"


@contextmanager
def _screen(*, as_json: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a text: in place of the last one in a terminal, otherwise below it."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    if as_json or not console.is_terminal:
        yield lambda text: click.echo(text if as_json else f"{text}\n")
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:

        def paint(text: str) -> None:
            shown = Text(text, no_wrap=True, overflow="ellipsis")
            for word, style in _STYLES.items():
                shown.highlight_words([word], style)
            live.update(shown, refresh=True)

        yield paint


_STYLES = {
    "RUNNING": "bold green",
    "FAILED": "bold red",
    "BROKEN": "bold red",
    "healthy": "bold green",
    "WARNING": "bold yellow",
    "PAUSED": "bold yellow",
    "STOPPED": "bold yellow",
}
"""Words that a terminal shows in colour."""
