"""Dagster's webserver behind a guard that only answers the UI's own pages.

Dagster's webserver has no login. It executes a GraphQL mutation that arrives as a GET, a form or plain text,
and sends the output of runs over a WebSocket, whichever page requests it. A browser sends such requests for
any page that the operator has open, and a page whose name resolves to this machine (DNS rebinding) counts as
the UI's own. A page cannot forge the headers ``Host``, ``Origin`` and ``Sec-Fetch-Site`` (Fetch standard,
"forbidden request-header"), so the guard decides by these. Programs other than browsers send no ``Origin``.

Run as ``python -m omnisupport_ingest.defs.webserver``, with the options of ``dagster-webserver``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from dagster_webserver import app, cli
from dagster_webserver.webserver import DagsterWebserver
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from omnisupport_ingest.defs import docs_pages
from omnisupport_ingest.settings import Settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OWN_NAMES = ("127.0.0.1", "localhost")
_DECIDING = ("host", "origin", "content-type", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")
_READING = frozenset(("GET", "HEAD", "OPTIONS"))
_SHOWN = 80
"""Most characters of a refused header that the answer quotes."""

_HEADERS = (
    # No other page may show the UI in a frame and trick the operator into clicking in it.
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"content-security-policy", b"frame-ancestors 'self'"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The parts of a request that the guard reads.

    ``method``: ``WEBSOCKET`` for the opening of a WebSocket. ``port``: the port on which this server listens;
    None if it does not listen on a port. ``headers``: lower-case names with all their values.
    """

    method: str
    path: str
    port: int | None
    headers: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, scope: Scope) -> RequestFacts:
        headers: dict[str, tuple[str, ...]] = {}
        for name, value in scope["headers"]:
            key = name.decode("latin-1").lower()
            headers[key] = (*headers.get(key, ()), value.decode("latin-1"))
        method = scope["method"] if scope["type"] == "http" else "WEBSOCKET"
        return cls(method, scope["path"], (scope.get("server") or (None, None))[1], headers)

    def header(self, name: str) -> str | None:
        """Return the first value of a header, the one that Dagster reads."""
        return next(iter(self.headers.get(name, ())), None)


def refusal(asked: RequestFacts, hosts: frozenset[str]) -> str | None:
    """Return why a request is refused; None if it is answered.

    ``hosts``: the names, with a port unless it is the scheme's, under which a reverse proxy shows the UI.
    """
    for name in _DECIDING:
        if len(asked.headers.get(name, ())) > 1:
            return f"it has several headers {name}."
    host = (asked.header("host") or "").lower()
    own = {f"{name}:{asked.port}" for name in _OWN_NAMES}
    if asked.port == 80:
        own |= set(_OWN_NAMES)
    if host not in own | hosts:
        return f"its Host, {_shown(host)}, is not a name of this UI. {_hosts_fix(host)}"
    origin = asked.header("origin")
    if origin is not None and not _is_own_origin(origin.lower(), host, own, hosts):
        return f"it comes from another page, {_shown(origin)}. {_hosts_fix(origin.rpartition('/')[2])}"
    graphql = asked.path.rstrip("/").endswith("/graphql")
    if asked.header("sec-fetch-site") not in (None, "same-origin", "none") and (
        graphql or not _opens_a_page(asked)
    ):
        return "the browser says that another page sends it (Sec-Fetch-Site)."
    if graphql and asked.method in _READING and "text/html" not in (asked.header("accept") or ""):
        return "GraphQL is answered by POST only. Send the query as JSON in the body."
    if asked.method not in (*_READING, "WEBSOCKET"):
        content_type = (asked.header("content-type") or "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            return f"its Content-Type is {_shown(content_type)}. Send JSON with application/json."
    return None


def _is_own_origin(origin: str, host: str, own: set[str], hosts: frozenset[str]) -> bool:
    scheme, _, authority = origin.partition("://")
    # A page of `localhost` may come from another server, on IPv6, than the UI at 127.0.0.1.
    if scheme == "http" and authority == host and host in own:
        return True
    return scheme in ("http", "https") and authority in hosts


def _opens_a_page(asked: RequestFacts) -> bool:
    """Return whether the request follows a link, for example from a wiki or an alarm: it only shows a
    page."""
    how = (asked.method, asked.header("sec-fetch-mode"), asked.header("sec-fetch-dest"))
    return how == ("GET", "navigate", "document")


def _shown(value: str) -> str:
    return f"“{value[:_SHOWN]}”" if value else "missing"


def _hosts_fix(name: str) -> str:
    if not name or not name.isascii() or not name.isprintable():
        return ""
    return (
        f"If a reverse proxy shows the UI under this name, set OMNISUPPORT_WEBSERVER_HOSTS={name[:_SHOWN]}."
    )


class RequestGuard:
    """ASGI middleware that answers a refused request with 403 and the reason, before it reaches Dagster."""

    def __init__(self, app: App, hosts: frozenset[str] = frozenset()) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        reason = refusal(RequestFacts.of(scope), self._hosts)
        if reason is not None:
            await _refuse(scope, send, f"The Dagster UI refuses this request: {reason.strip()}\n")
            return

        async def send_unframed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        await self._app(scope, receive, send_unframed)


async def _refuse(scope: Scope, send: Send, text: str) -> None:
    kind = "http.response"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            # If a connection is closed before it was accepted, servers answer with 403.
            await send({"type": "websocket.close", "code": 1008})
            return
        kind = "websocket.http.response"
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"x-content-type-options", b"nosniff")]
    await send({"type": f"{kind}.start", "status": 403, "headers": headers})
    await send({"type": f"{kind}.body", "body": text.encode()})


class GuardedWebserver(DagsterWebserver):  # type: ignore[type-arg]
    """Dagster's webserver with the guard before everything else in it, and the pages of the documentation."""

    def build_middleware(self) -> list[Middleware]:
        return [Middleware(RequestGuard, hosts=Settings().ui_hosts), *super().build_middleware()]

    def build_routes(self) -> list[BaseRoute]:
        return [*docs_pages.routes(), *super().build_routes()]  # type: ignore[no-untyped-call]


def main() -> None:
    """Run ``dagster-webserver``, guarded."""
    # Dagster's command creates the application from this name. `up` sends the server that it has started a
    # request with a foreign Host, so a Dagster that uses another name is noticed at once.
    setattr(app, "DagsterWebserver", GuardedWebserver)  # noqa: B010 - mypy: the name is not exported
    cli.dagster_webserver()


if __name__ == "__main__":
    main()
