"""The documentation in the UI: every page and every link of it, and the pages that assets link to."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urljoin

import dagster as dg
import pytest
from starlette.applications import Starlette
from uvicorn import Config, Server

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs.docs_pages import routes
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.ports import LOOPBACK, answers, free_port
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.waiting import until

ROOT = Path(__file__).parents[2]
PAGES = sorted(f"/omnisupport/{page.relative_to(ROOT).as_posix()}" for page in (ROOT / "docs").rglob("*.md"))

_ADDRESS = re.compile(r'(?:href|src)="([^"]+)"')


@dataclass(frozen=True)
class Ui:
    """A webserver that shows the documentation alone."""

    port: int

    def get(self, path: str) -> tuple[int, str, str]:
        """Return status, text and ``Location`` for ``path``, which is sent as it is."""
        connection = HTTPConnection(LOOPBACK, self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("latin-1"), answer.headers.get("location", "")
        finally:
            connection.close()


@pytest.fixture(scope="module")
def ui() -> Iterator[Ui]:
    port = free_port()
    server = Server(Config(Starlette(routes=routes()), host=LOOPBACK, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: answers(port))
    yield Ui(port)
    server.should_exit = True
    thread.join()


def test_every_link_of_every_page_leads_somewhere(ui: Ui) -> None:
    led: dict[str, tuple[str, str]] = {}
    for page in PAGES:
        status, text, _ = ui.get(page)
        assert status == 200
        assert "```" not in text and "<p>=== " not in text, f"{page} has marks that were not understood"
        for link in _ADDRESS.findall(text):
            led.setdefault(urljoin(page, link), (page, link))
    ours = {target: at for target, at in led.items() if target.startswith("/omnisupport/")}
    assert [at for target, at in ours.items() if not _there(ui, target)] == []


def _there(ui: Ui, target: str) -> bool:
    address, _, anchor = target.partition("#")
    status, text, _ = ui.get(address)
    return status == 200 and (not anchor or f'id="{anchor}"' in text)


def test_the_bare_address_leads_to_the_first_page(ui: Ui) -> None:
    assert ui.get("/omnisupport")[2] == "/omnisupport/docs/index.md"
    assert "<h1" in ui.get("/omnisupport/docs/index.md")[1]


@pytest.mark.parametrize(
    "path",
    [
        "docs/../pyproject.toml",
        "docs/%2e%2e/pyproject.toml",
        "docs/..%2fpyproject.toml",
        "pyproject.toml",
        "docs/site_hooks.py",
        "/etc/passwd",
        "docs/nothing.md",
    ],
)
def test_nothing_but_the_documentation_is_handed_out(ui: Ui, path: str) -> None:
    assert ui.get(f"/omnisupport/{path}")[0] == 404


def test_every_asset_links_to_a_page_that_is_there(tmp_path: Path, ui: Ui) -> None:
    settings = Settings(home=tmp_path / "home", _env_file=None)  # type: ignore[call-arg]
    contracts = load_contracts(ROOT / "contracts" / "data")
    workspace = Workspace(settings, Home.open(settings.home, WindowSize(60)), contracts)
    linked = dict(_links(build_definitions(workspace)))
    assert [str(key) for key, link in linked.items() if link is None] == []
    assert [link for link in set(linked.values()) if link and not _there(ui, link)] == []


def _links(definitions: dg.Definitions) -> Iterator[tuple[dg.AssetKey, str | None]]:
    graph = definitions.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        entry = graph.get(key).metadata.get("documentation")
        yield key, None if entry is None else entry.url
