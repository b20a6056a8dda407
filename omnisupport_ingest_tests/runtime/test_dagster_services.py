"""What ``up`` asks of the webserver that it has started, and where the code server listens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.dagster_home import write_workspace
from omnisupport_ingest.runtime.dagster_services import (
    _require_guard,
    code_server_command,
    code_server_socket,
)
from omnisupport_ingest.runtime.ports import LOOPBACK
from omnisupport_ingest.runtime.supervisor import ServiceFailed
from omnisupport_ingest.settings import Settings


@contextmanager
def webserver(*, guarded: bool, hangs_up: int = 0) -> Iterator[int]:
    """A server that answers GraphQL; ``guarded``: for its own Host alone. Yields its port.

    ``hangs_up``: so many requests get no answer at first.
    """
    unanswered = iter(range(hangs_up))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if next(unanswered, None) is not None:
                return
            own = self.headers["Host"] == f"{LOOPBACK}:{server.server_port}"
            self.send_response(200 if own or not guarded else 403)
            self.end_headers()
            self.wfile.write(json.dumps({"data": {"version": "1"}}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer((LOOPBACK, 0), Handler) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            serving.join()


def test_a_ui_that_answers_a_foreign_host_is_not_left_running() -> None:
    """As Dagster's own would, should an upgrade no longer take the guard."""
    with webserver(guarded=False) as port, pytest.raises(ServiceFailed) as told:
        _require_guard(port)
    assert "other web pages" in told.value.problem
    with webserver(guarded=True) as port:
        _require_guard(port)


def test_a_ui_that_is_too_busy_to_answer_at_once_is_asked_again() -> None:
    with webserver(guarded=True, hangs_up=2) as port:
        _require_guard(port)
    with webserver(guarded=False, hangs_up=2) as port, pytest.raises(ServiceFailed, match="other web pages"):
        _require_guard(port)


def test_a_ui_that_never_says_whom_it_answers_is_not_left_running() -> None:
    with webserver(guarded=True, hangs_up=1_000_000) as port:
        with pytest.raises(ServiceFailed, match="no answer within") as told:
            _require_guard(port, seconds=0.3)
        assert "ConnectionError" not in told.value.problem


def test_the_code_server_listens_on_a_socket_of_the_home_and_the_workspace_names_it(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home", _env_file=None)
    home = Home.open(settings.home, settings.window_size)
    socket = code_server_socket(home)
    write_workspace(home, socket)
    written = yaml.safe_load((home.dagster / "workspace.yaml").read_text())
    assert written["load_from"] == [
        {"grpc_server": {"socket": str(socket), "location_name": "omnisupport_ingest"}}
    ]
    command = code_server_command(socket)
    assert command[command.index("-s") + 1] == str(socket)
    assert not {"-p", "--port", "-h"} & set(command)
