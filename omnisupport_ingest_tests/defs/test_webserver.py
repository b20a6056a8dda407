"""Who may ask the Dagster UI: its own pages, and programs of this machine that send JSON."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from omnisupport_ingest.defs.webserver import (
    Message,
    Receive,
    RequestFacts,
    RequestGuard,
    Scope,
    Send,
    refusal,
)
from omnisupport_ingest.runtime.ports import LOOPBACK, answers, free_port
from omnisupport_ingest_tests.waiting import PATIENCE

PORT = 3000
OWN = {"host": f"{LOOPBACK}:{PORT}"}
JSON = {"content-type": "application/json"}
EVIL = "http://evil.example"

# ---- every kind of request, decided by its headers alone -----------------------------------------


def asked(method: str, path: str, headers: dict[str, str]) -> RequestFacts:
    return RequestFacts(method, path, PORT, {name: (value,) for name, value in headers.items()})


ANSWERED = {
    "a page of the UI": ("GET", "/runs", OWN | {"sec-fetch-site": "none"}),
    "the UI under localhost": ("GET", "/", {"host": f"localhost:{PORT}"}),
    "a name in capitals": ("GET", "/", {"host": f"LocalHost:{PORT}"}),
    "a link that was followed from a wiki": (
        "GET",
        "/runs/1",
        OWN | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
    ),
    "a query of the UI": (
        "POST",
        "/graphql",
        OWN | {"origin": f"http://{LOOPBACK}:{PORT}", "sec-fetch-site": "same-origin"} | JSON,
    ),
    "JSON with its character set": (
        "POST",
        "/graphql",
        OWN | {"content-type": "application/json; charset=utf-8"},
    ),
    "a program that is no browser": ("POST", "/graphql", OWN | JSON),
    "GraphiQL": ("GET", "/graphql", OWN | {"accept": "text/html,*/*", "sec-fetch-site": "same-origin"}),
    "the WebSocket of the UI": ("WEBSOCKET", "/graphql", OWN | {"origin": f"http://{LOOPBACK}:{PORT}"}),
    "a WebSocket of a program": ("WEBSOCKET", "/graphql", OWN),
    "behind a proxy": ("GET", "/", {"host": "dagster.example"}),
    "a query behind a proxy with TLS": (
        "POST",
        "/graphql",
        {"host": "dagster.example:8443", "origin": "https://dagster.example:8443"} | JSON,
    ),
    "behind a proxy that names us by our port": (
        "POST",
        "/graphql",
        OWN | {"origin": "https://dagster.example"} | JSON,
    ),
}
REFUSED = {
    "a name that was made to point here": ("POST", "/graphql", {"host": f"evil.example:{PORT}"} | JSON),
    "a page under such a name": ("GET", "/", {"host": f"evil.example:{PORT}", "sec-fetch-site": "none"}),
    "a WebSocket under such a name": ("WEBSOCKET", "/graphql", {"host": f"evil.example:{PORT}"}),
    "another port in Host": ("GET", "/", {"host": f"{LOOPBACK}:{PORT + 1}"}),
    "no port in Host": ("GET", "/", {"host": LOOPBACK}),
    "a name that begins like ours": ("GET", "/", {"host": f"localhost:{PORT}.evil.example"}),
    "no Host": ("GET", "/", {}),
    "a page elsewhere": ("POST", "/graphql", OWN | {"origin": EVIL} | JSON),
    "a sandboxed page": ("POST", "/graphql", OWN | {"origin": "null"} | JSON),
    "an empty Origin": ("POST", "/graphql", OWN | {"origin": ""} | JSON),
    "a page of another port here": ("POST", "/graphql", OWN | {"origin": f"http://{LOOPBACK}:8000"} | JSON),
    "a page of our port by TLS": ("POST", "/graphql", OWN | {"origin": f"https://{LOOPBACK}:{PORT}"} | JSON),
    "a page of our port on another address": (
        "POST",
        "/graphql",
        OWN | {"origin": f"http://localhost:{PORT}"} | JSON,
    ),
    "the name of the proxy on another port": (
        "POST",
        "/graphql",
        OWN | {"origin": "https://dagster.example:9"} | JSON,
    ),
    "a WebSocket of a page elsewhere": ("WEBSOCKET", "/graphql", OWN | {"origin": EVIL}),
    "a WebSocket of a sandboxed page": ("WEBSOCKET", "/graphql", OWN | {"origin": "null"}),
    "a picture in a page elsewhere": (
        "GET",
        "/logs/x",
        OWN | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    ),
    "a picture in a page of another port here": (
        "GET",
        "/logs/x",
        OWN | {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    ),
    "the UI in a frame of a page elsewhere": (
        "GET",
        "/",
        OWN | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ),
    "a form that a page elsewhere sends": (
        "POST",
        "/runs",
        OWN
        | {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
        | JSON,
    ),
    "a link to GraphiQL with a mutation in it": (
        "GET",
        "/graphql",
        OWN
        | {"accept": "text/html", "sec-fetch-site": "cross-site"}
        | {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
    ),
    "GraphQL by GET": ("GET", "/graphql", OWN | {"accept": "*/*"}),
    "GraphQL by HEAD": ("HEAD", "/graphql", OWN),
    "GraphQL as plain text": ("POST", "/graphql", OWN | {"content-type": "text/plain"}),
    "plain text that calls itself JSON": (
        "POST",
        "/graphql",
        OWN | {"content-type": "text/plain; application/json"},
    ),
    "GraphQL as a form": ("POST", "/graphql", OWN | {"content-type": "application/x-www-form-urlencoded"}),
    "GraphQL as itself": ("POST", "/graphql", OWN | {"content-type": "application/graphql"}),
    "a POST of no type": ("POST", "/report_asset_materialization/x", OWN),
}


@pytest.mark.parametrize("request_", ANSWERED.values(), ids=ANSWERED)
def test_it_answers(request_: tuple[str, str, dict[str, str]]) -> None:
    assert refusal(asked(*request_), frozenset(("dagster.example", "dagster.example:8443"))) is None


@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED)
def test_it_refuses(request_: tuple[str, str, dict[str, str]]) -> None:
    assert refusal(asked(*request_), frozenset(("dagster.example", "dagster.example:8443"))) is not None


def test_without_the_setting_no_other_name_is_answered() -> None:
    for name in (
        "behind a proxy",
        "a query behind a proxy with TLS",
        "behind a proxy that names us by our port",
    ):
        assert refusal(asked(*ANSWERED[name]), frozenset()) is not None


@pytest.mark.parametrize("name", ["host", "origin", "content-type", "sec-fetch-site"])
def test_a_header_that_comes_twice_is_refused(name: str) -> None:
    good = asked("POST", "/graphql", OWN | JSON)
    value = {"host": OWN["host"], **JSON, "origin": f"http://{LOOPBACK}:{PORT}"}.get(name, "same-origin")
    twice = RequestFacts(good.method, good.path, good.port, {**good.headers, name: (value, value)})
    assert refusal(twice, frozenset()) is not None


def test_a_refusal_says_why_and_names_the_setting() -> None:
    said = refusal(asked("GET", "/", {"host": "dagster.example"}), frozenset())
    assert said is not None
    assert "“dagster.example”" in said
    assert "OMNISUPPORT_WEBSERVER_HOSTS=dagster.example" in said


# ---- as middleware: nothing of a refused request reaches what is behind it ----------------------------


async def behind(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers everything."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-of-the-page", b"yes")]})
        await send({"type": "http.response.body", "body": b"done"})
    else:
        await send({"type": "websocket.accept"})


def answer_of(headers: dict[str, str], *, kind: str = "http", extensions: bool = True) -> list[Message]:
    """What a server would be told to answer to a POST, or to the opening of a WebSocket."""
    said: list[Message] = []

    async def send(message: Message) -> None:
        said.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing of the request is to be read")

    scope: Scope = {
        "type": kind,
        "method": "POST",
        "path": "/graphql",
        "server": (LOOPBACK, PORT),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "extensions": {"websocket.http.response": {}} if extensions else {},
    }
    asyncio.run(RequestGuard(behind)(scope, receive, send))
    return said


def test_a_refused_request_gets_403_and_a_sentence_and_an_answered_one_the_page() -> None:
    assert answer_of(OWN | JSON)[-1]["body"] == b"done"
    start, body = answer_of(OWN | JSON | {"origin": EVIL})
    assert start["status"] == 403
    assert body["body"].startswith(b"The Dagster UI refuses this request: it comes from another page")


def test_a_refused_websocket_is_never_accepted() -> None:
    assert answer_of(OWN, kind="websocket") == [{"type": "websocket.accept"}]
    assert answer_of(OWN | {"origin": EVIL}, kind="websocket")[0]["status"] == 403
    (closed,) = answer_of(OWN | {"origin": EVIL}, kind="websocket", extensions=False)
    assert closed["type"] == "websocket.close"


def test_no_other_page_may_show_the_ui_in_a_frame() -> None:
    headers = dict(answer_of(OWN | JSON)[0]["headers"])
    assert headers[b"x-of-the-page"] == b"yes"
    assert headers[b"x-frame-options"] == b"SAMEORIGIN"
    assert headers[b"content-security-policy"] == b"frame-ancestors 'self'"


# ---- the real server, and Dagster's own beside it ------------------------------------------------------

PLAIN, GUARDED = "dagster_webserver", "omnisupport_ingest.defs.webserver"

_PYTHONPATH = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
"""So that the server is that of the code under test, wherever another version is installed."""


@dataclass(frozen=True)
class Server:
    """A running webserver on an instance of its own."""

    port: int

    @property
    def host(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def request(self, method: str, target: str, body: str | None, headers: dict[str, str]) -> tuple[int, str]:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=PATIENCE)
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def query(self, query: str) -> dict[str, object]:
        """What a program of ours gets: JSON by POST, without Origin."""
        status, said = self.request(
            "POST", "/graphql", json.dumps({"query": query}), {"Content-Type": "application/json"}
        )
        assert status == 200, said
        data: dict[str, object] = json.loads(said)["data"]
        return data

    def over_websocket(self, query: str, host: str, origin: str | None) -> str:
        start = {"type": "start", "id": "1", "payload": {"query": query}}
        try:
            with connect(
                f"ws://{host}/graphql",
                sock=socket.create_connection((LOOPBACK, self.port)),
                origin=origin,  # type: ignore[arg-type]
                subprotocols=["graphql-ws"],  # type: ignore[list-item]
                proxy=None,
            ) as talked:
                talked.send(json.dumps({"type": "connection_init"}))
                talked.send(json.dumps(start))
                kinds = []
                while not {"data", "error", "complete"} & set(kinds):
                    kinds.append(json.loads(talked.recv(timeout=PATIENCE))["type"])
                return kinds[-1]
        except InvalidStatus as refused:
            return f"refused {refused.response.status_code}"


@pytest.fixture(scope="module", params=[PLAIN, GUARDED])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    folder = tmp_path_factory.mktemp("dagster")
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    server = Server(free_port())
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                request.param,
                "-h",
                LOOPBACK,
                "-p",
                str(server.port),
                "--empty-workspace",
            ],
            cwd=folder,
            env={"DAGSTER_HOME": str(folder), "PATH": "/usr/bin:/bin"} | _PYTHONPATH,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            give_up = time.monotonic() + PATIENCE
            while not answers(server.port):
                said = (folder / "log").read_text()
                assert process.poll() is None, f"the webserver ended: {said}"
                assert time.monotonic() < give_up, f"it does not listen after {PATIENCE:.0f} s: {said}"
                time.sleep(0.2)
            yield request.param, server
        finally:
            process.terminate()
            process.wait(PATIENCE)


LOG_OF_A_RUN = """subscription { pipelineRunLogs(runId: "4711") {
  ... on PipelineRunLogsSubscriptionFailure { message } } }"""


def close_pool(name: str) -> str:
    return f'mutation {{ setConcurrencyLimit(concurrencyKey: "{name}", limit: 0) }}'


def closed_pools(server: Server) -> set[str]:
    said = server.query("{ instance { concurrencyLimits { concurrencyKey slotCount } } }")
    limits = said["instance"]["concurrencyLimits"]  # type: ignore[index]
    return {each["concurrencyKey"] for each in limits if each["slotCount"] == 0}


@pytest.mark.slow
def test_what_other_pages_send_changes_nothing_although_dagster_by_itself_would_do_it(
    served: tuple[str, Server],
) -> None:
    """Each sets a pool to 0, which would stop a table. On Dagster's own webserver each of them works."""
    kind, server = served
    foreign, as_json = {"Origin": EVIL}, {"Content-Type": "application/json"}

    def target(pool: str) -> str:
        return "/graphql?" + urllib.parse.urlencode({"query": close_pool(pool)})

    def body(pool: str) -> str:
        return json.dumps({"query": close_pool(pool)})

    form = {"Content-Type": "application/x-www-form-urlencoded"}
    # The body of a form or of plain text is not read: Dagster takes the query from the address.
    sent = {
        "get": ("GET", target("get"), None, {}),
        "picture": ("GET", target("picture"), None, {"Sec-Fetch-Site": "cross-site", "Accept": "image/*"}),
        "text": ("POST", target("text"), "", foreign | {"Content-Type": "text/plain"}),
        "text_of_old_browser": ("POST", target("text_of_old_browser"), "", {"Content-Type": "text/plain"}),
        "text_as_json": (
            "POST",
            "/graphql",
            body("text_as_json"),
            {"Content-Type": "text/plain; application/json"},
        ),
        "form": ("POST", target("form"), "", foreign | form),
        "foreign_json": ("POST", "/graphql", body("foreign_json"), foreign | as_json),
        "sandboxed_json": ("POST", "/graphql", body("sandboxed_json"), {"Origin": "null"} | as_json),
        "rebound": ("POST", "/graphql", body("rebound"), {"Host": f"evil.example:{server.port}"} | as_json),
        "rebound_page": (
            "POST",
            "/graphql",
            body("rebound_page"),
            {"Host": f"evil.example:{server.port}", "Origin": f"http://evil.example:{server.port}"} | as_json,
        ),
    }
    answered = {name: server.request(*each)[0] for name, each in sent.items()}
    if kind == PLAIN:
        assert set(answered.values()) == {200}
        assert closed_pools(server) == set(sent)
    else:
        assert set(answered.values()) == {403}, answered
        assert closed_pools(server) == set()


@pytest.mark.slow
def test_what_runs_print_is_not_sent_to_the_websocket_of_another_page(served: tuple[str, Server]) -> None:
    """Dagster takes subscriptions over a WebSocket, not mutations; by itself it hands them to any page."""
    kind, server = served
    talked = {
        server.over_websocket(LOG_OF_A_RUN, server.host, EVIL),
        server.over_websocket(LOG_OF_A_RUN, server.host, "null"),
        server.over_websocket(LOG_OF_A_RUN, f"evil.example:{server.port}", None),
        server.over_websocket(
            LOG_OF_A_RUN, f"evil.example:{server.port}", f"http://evil.example:{server.port}"
        ),
    }
    assert talked == ({"data"} if kind == PLAIN else {"refused 403"})
    assert server.over_websocket(LOG_OF_A_RUN, server.host, f"http://{server.host}") == "data"
    assert server.over_websocket(LOG_OF_A_RUN, server.host, None) == "data"


@pytest.mark.slow
def test_what_the_ui_itself_and_programs_send_works(served: tuple[str, Server]) -> None:
    _, server = served
    own = {
        "Origin": f"http://{server.host}",
        "Sec-Fetch-Site": "same-origin",
        "Content-Type": "application/json",
    }
    status, said = server.request("POST", "/graphql", json.dumps({"query": close_pool("by_the_ui")}), own)
    assert (status, json.loads(said)["data"]) == (200, {"setConcurrencyLimit": True})
    server.query(close_pool("by_a_program"))
    assert {"by_the_ui", "by_a_program"} <= closed_pools(server)
    for page_of_ui in ("/", "/runs", "/server_info"):
        assert server.request("GET", page_of_ui, None, {"Accept": "text/html"})[0] == 200
    status, graphiql = server.request("GET", "/graphql", None, {"Accept": "text/html"})
    assert status == 200
    assert "graphiql" in graphiql
