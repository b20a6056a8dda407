"""The pictures in ``docs/images``, made anew from a platform that really runs: ``make screenshots``.

A demo runs in a home of its own, then ``up`` on that home, and a headless Chromium takes the pictures of its
UI. Look at every picture before it is committed: nothing here knows whether it still shows what its caption
says.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import click
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PROGRAM = ROOT / ".venv" / "bin" / "omnisupport-ingest"

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_SECONDS_TO_START = 600
_SECONDS_TO_SETTLE = 90
"""How long the platform runs before the pictures, so that every check has run."""

_WINDOW = re.compile(r"^\d{4}-\d\d-\d\dT\d{4}$")
_ENDS_OF_THE_BAR = 2
"""The page names two windows before its list."""

_TICKETS, _DEDUPED = "/assets/support_desk/dim_tickets", "/assets/support_desk/deduped_events"
_CUSTOMERS = "/assets/support_desk/dim_customers"
_WIDTH = 1_600


def main() -> None:
    """Run the demo and the platform, and write every picture."""
    browser = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if browser is None:
        sys.exit(f"None of {', '.join(_CHROMIUM)} is installed. Debian: apt install chromium.")
    with tempfile.TemporaryDirectory(prefix="screenshots-") as folder:
        home = Path(folder) / "home"
        _run(home, "demo", "--changes", "20000")
        with _platform(home) as address:
            time.sleep(_SECONDS_TO_SETTLE)
            with sync_playwright() as playwright:
                found = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
                _take(found, address)
                found.close()
        _run(home, "clean", "--yes")


def _take(browser: Browser, address: str) -> None:
    page = _opened(
        browser, f"{address}{_TICKETS}?view=lineage&lineageScope=upstream&lineageDepth=3", height=560
    )
    _shoot(page, "asset_graph")
    page = _opened(browser, f"{address}{_TICKETS}?view=partitions", height=1300)
    page.get_by_text(re.compile(r"^Missing \(")).click()
    page.get_by_text(_WINDOW).nth(_ENDS_OF_THE_BAR).click()
    page.wait_for_timeout(4_000)
    _shoot(page, "partition")
    page = _opened(browser, f"{address}{_DEDUPED}?view=overview", height=1200)
    page.get_by_text("Plots", exact=True).first.click()
    page.wait_for_timeout(4_000)
    _shoot(page, "plots")
    page = _opened(browser, f"{address}{_CUSTOMERS}?view=overview", height=2_200)
    _shoot(page, "columns", rows=1_000)


def _opened(browser: Browser, address: str, *, height: int) -> Page:
    page = browser.new_page(viewport={"width": _WIDTH, "height": height})
    page.goto(address)
    # The UI asks for its data all the time, so the network is never still.
    page.wait_for_timeout(12_000)
    return page


def _shoot(page: Page, name: str, rows: int | None = None) -> None:
    """Write the picture of the page, or of its upper ``rows`` pixels."""
    part = None if rows is None else {"x": 0, "y": 0, "width": _WIDTH, "height": rows}
    page.screenshot(path=IMAGES / f"{name}.png", clip=part)
    page.close()
    click.echo(f"docs/images/{name}.png")


def _run(home: Path, *arguments: str) -> str:
    done = subprocess.run(
        [PROGRAM, *arguments], env=_environment(home), stdout=subprocess.PIPE, text=True, check=False
    )
    # Health is an exit code of `status`, and a platform at work may have a warning.
    if done.returncode > 1:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


@contextmanager
def _platform(home: Path) -> Iterator[str]:
    """The address of the UI of ``up`` on ``home``, which ends with the context."""
    log = home.parent / "up.log"
    with log.open("w") as output:
        running = subprocess.Popen(
            [PROGRAM, "up"],
            env=_environment(home),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield _address(running, log)
    finally:
        running.send_signal(signal.SIGINT)
        running.wait()


def _address(running: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < until and running.poll() is None:
        named = re.search(r"http://[\w.]+:\d+", log.read_text())
        if named is not None and _answers(named[0]):
            return named[0]
        time.sleep(1)
    sys.exit(f"The platform did not start:\n{log.read_text()}")


def _answers(address: str) -> bool:
    where = urlsplit(address)
    with suppress(OSError), closing(HTTPConnection(where.netloc, timeout=5)) as connection:
        connection.request("GET", "/server_info")
        return connection.getresponse().status == HTTPStatus.OK
    return False


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "OMNISUPPORT_HOME": str(home)}


if __name__ == "__main__":
    main()
