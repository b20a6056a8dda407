"""The sensors of a running platform, read from its Dagster UI (Dagster's GraphQL API)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any

from omnisupport_ingest.foreign import parse_json
from omnisupport_ingest.runtime.ports import LOOPBACK

_ANSWER_BYTES = 16 * 1024 * 1024

_QUESTION = """{ repositoriesOrError { ... on RepositoryConnection { nodes { sensors {
  name sensorState { status ticks(limit: 1) { status timestamp skipReason } } } } } } }"""


@dataclass(frozen=True, slots=True)
class SensorSeen:
    """A sensor. ``running``: False if a person stopped it.

    ``tick``: the result of its last tick (``SUCCESS``, ``SKIPPED``, ``FAILURE``, ``STARTED``); None before
    the first. ``said``: why the tick requested nothing.
    """

    name: str
    running: bool
    tick: str | None
    tick_at: datetime | None
    said: str | None


def sensors_seen(port: int, *, seconds: float = 0.7) -> tuple[SensorSeen, ...] | None:
    """Return every sensor of the UI at the loopback ``port``; None if it does not answer in time."""
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/graphql",
        data=json.dumps({"query": _QUESTION}).encode(),
        headers={"Content-Type": "application/json"},
    )
    # A proxy from the environment must not be used for loopback.
    open_directly: Callable[..., Any] = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    try:
        with open_directly(request, timeout=seconds) as response:
            return tuple(read_answer(parse_json(response.read(_ANSWER_BYTES))))
    except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        # Another program answers at that port, not the UI of this home.
        return None


def read_answer(answer: dict[str, Any]) -> Iterator[SensorSeen]:
    """Yield the sensors in an answer of Dagster."""
    for repository in answer["data"]["repositoriesOrError"]["nodes"]:
        for sensor in repository["sensors"]:
            state = sensor["sensorState"]
            last = state["ticks"][0] if state["ticks"] else {}
            moment = last.get("timestamp")
            yield SensorSeen(
                name=sensor["name"],
                running=state["status"] == "RUNNING",
                tick=last.get("status"),
                tick_at=datetime.fromtimestamp(moment, UTC) if moment is not None else None,
                said=last.get("skipReason"),
            )
