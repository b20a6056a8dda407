"""``explain``: why a row, or one of its cells, is what it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.opening import (
    SOURCE_OF_TABLE,
    key_named,
    open_workspace,
    table_of,
)
from omnisupport_ingest.cli.views import operation_name, review_document
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.cell_origins import KeyEvent, Origin
from omnisupport_ingest.read.explain import Explanation
from omnisupport_ingest.read.explain import explain as look_up
from omnisupport_ingest.review.erasing import key_text

_LONGEST = 60
"""Characters of a value that people see; ``--json`` has the whole value."""

_WHY = {
    "decides": "decides",
    "older position": "lost: older position",
    "earlier life": "lost: of an earlier life of the key",
    "column not sent": "lost: did not send the column",
    "carries no values": "carries no values",
    "quarantined": "lost: in quarantine",
    "quarantined, and hides older values": "in quarantine; what older events carried is not shown",
    "quarantined, an accepted event has its position": "lost: in quarantine, another has its position",
    "below a quarantined delete": "lost: below a delete in quarantine",
    "of an old key": "lost: of the old key of the row",
}
"""Role → its words for people."""


@click.command()
@click.argument("table")
@click.option("--key", "key", metavar="KEY", multiple=True, required=True, help="The row's key; see above.")
@click.option("--column", metavar="COLUMN", help="Explain this column, event by event.")
@click.option("--source", metavar="NAME", help=SOURCE_OF_TABLE)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def explain(table: str, key: tuple[str, ...], column: str | None, source: str | None, as_json: bool) -> None:
    """Explain why a row of TABLE, or one cell of it, has the value that the dimension shows.

    Names the event that decided each column, with its position, transaction, batch and landing file, and
    the runs that took it from landing to the dimension. With --column every other event of the key says why
    it did not decide: older position, earlier life, column not sent, quarantined, duplicate. Late events,
    decisions of people and erasures are named.

    KEY is the key as PostgreSQL prints it: its value, or COLUMN=VALUE once for each column of the key. Values
    are those of the lake, as the policies for personal data left them; no value of a quarantined event is
    shown.

    \b
    Examples:
      omnisupport-ingest explain tickets --key 42
      omnisupport-ingest explain tickets --key 42 --column status
      omnisupport-ingest explain order_lines --key order_id=7 --key line=1 --json

    Exit code: 0 explained, 1 the lake has no event of that key, 2 usage or settings, 3 no home or a ledger is
    damaged.
    """
    workspace = open_workspace()
    contract = table_of(workspace, table, source)
    if column is not None and column not in contract.column_names:
        raise click.UsageError(
            f"{contract.full_name} has no column {column!r} in the lake. There are: "
            f"{', '.join(contract.column_names)}"
        )
    explanation = look_up(workspace, contract, key_text(key_named(contract, key)))
    if as_json:
        render.echo_json(_document(explanation, column))
    else:
        _show(explanation, column)


# --- as JSON -----------------------------------------------------------------------------------------------


def _document(explanation: Explanation, column: str | None) -> dict[str, Any]:
    origins = explanation.origins
    return {
        "source": explanation.contract.source,
        "table": explanation.contract.full_name,
        "key": explanation.key,
        "row": None
        if origins is None
        else {
            "last_event": _id(explanation, origins.last),
            "deleted_by": _id(explanation, origins.ended_by) if origins.ended_by else None,
            "marked_deleted_by": _id(explanation, explanation.marked.event)
            if explanation.marked is not None and explanation.marked.event is not None
            else None,
            "existence_resolved": origins.existence,
            "dimension_shows_last_event": explanation.up_to_date,
        },
        "columns": [_origin_document(explanation, each) for each in _origins(explanation, column)],
        "events": [_event_document(explanation, each, column) for each in explanation.events],
        "copies": [
            {
                "position": _position_text(each.position),
                "window": each.window,
                "batch_id": each.batch_id,
                "landed_at": each.landed_at.isoformat(),
                "role": "duplicate" if each.duplicate else "not judged yet",
                "copies": each.copies,
            }
            for each in explanation.copies
        ],
        "erasures": [
            {"by": each.erased_by, "why": each.why, "at": each.erased_at.isoformat()}
            for each in explanation.erasures
        ],
        "path": [
            {
                "layer": each.layer,
                "table": each.table,
                "window": each.window,
                "run_id": each.run_id,
                "committed_at": each.committed_at.isoformat(),
                "generation": each.generation,
            }
            for each in explanation.checkpoints
        ],
        "batches_not_judged": list(explanation.waiting),
    }


def _origin_document(explanation: Explanation, origin: Origin) -> dict[str, Any]:
    policy = explanation.contract.column(origin.column)
    return {
        "column": origin.column,
        "resolved": origin.resolved,
        "value": origin.value,
        "personal_data_policy": policy.pii if policy.personal else None,
        "decided_by": _id(explanation, origin.event) if origin.event is not None else None,
        "from_old_key": origin.old_key,
        "by_default": origin.by_default,
    }


def _event_document(explanation: Explanation, event: KeyEvent, column: str | None) -> dict[str, Any]:
    landed, ref = explanation.landed[event.batch_id], explanation.ref(event)
    document = {
        "id": str(ref),
        "op": event.op,
        "window": event.window,
        "tx_id": event.facts["tx_id"],
        "commit_lsn": str(ref.position.commit_lsn),
        "committed_at": event.source_ts.isoformat(),
        "landed_at": render.iso(event.landed_at),
        "batch_id": event.batch_id,
        "landing_file": landed.file_of(event),
        "origin": landed.origin,
        "file_name": event.facts["file_name"],
        "file_row": event.facts["file_row"],
        "lake_file": event.facts["lake_file"],
        "late": (event.window, event.position) in explanation.late,
        "quarantine_reason": event.facts.get("reason"),
        "quarantine_state": event.facts.get("review_state"),
        "reviews": [review_document(each) for each in explanation.reviews.get(ref, ())],
    }
    if column is not None:
        document["role"] = _role(explanation, event, column)
    return document


def _id(explanation: Explanation, event: KeyEvent) -> str:
    return str(explanation.ref(event))


# --- for people --------------------------------------------------------------------------------------------


def _show(explanation: Explanation, column: str | None) -> None:
    render.heading(
        f"{explanation.contract.full_name} of {explanation.contract.source}, key {explanation.key}"
    )
    render.facts(_row_facts(explanation))
    if column is None:
        _show_columns(explanation)
        click.echo()
        render.heading("Events")
        _show_events(explanation, None)
        return
    origin = next(iter(_origins(explanation, column)), None)
    click.echo()
    if origin is None:
        click.echo(f"{column}: no event of a row is in the lake.")
    else:
        render.heading(f"{column} = {_value(explanation, origin)}")
        render.facts(_origin_facts(explanation, origin), indent=2, label=17)
    click.echo()
    render.heading("Every event of the key, in the order of the log")
    _show_events(explanation, column)


def _row_facts(explanation: Explanation) -> Iterator[tuple[str, str]]:
    origins = explanation.origins
    if origins is None:
        yield "row", "no event of a row was judged yet"
    else:
        if not origins.existence:
            state = "not known to exist: a delete of it is in quarantine"
        elif origins.ended_by is not None:
            state = f"deleted by {_event(origins.ended_by)}; columns show the last known values"
        elif explanation.marked is not None and explanation.marked.event is not None:
            state = f"deleted: {explanation.marked.column} was set by {_event(explanation.marked.event)}"
        else:
            state = "lives"
        yield "row", state
        yield "last event", _event(origins.last)
        shown = "shows the last event" if explanation.up_to_date else "does not show the last event"
        yield "dimension", shown if explanation.shown is not None else "has no such row"
    for each in explanation.erasures:
        yield "erased", f"by {each.erased_by}, {render.clock(each.erased_at)}: {each.why}"
    if explanation.waiting:
        batches = render.counted(len(explanation.waiting), "batch")
        yield (
            "waiting",
            f"{batches} of the table landed and not judged yet: {render.some(explanation.waiting, 2)}",
        )


def _origins(explanation: Explanation, column: str | None) -> list[Origin]:
    if explanation.origins is None:
        return []
    names = explanation.contract.column_names if column is None else (column,)
    # Every event has the key; that of the last event is used.
    return [
        explanation.origins.columns.get(name) or Origin(name, explanation.origins.last, resolved=True)
        for name in names
    ]


def _show_columns(explanation: Explanation) -> None:
    rows = [
        [
            origin.column,
            "key" if origin.column in explanation.contract.key else _value(explanation, origin),
            "-" if origin.event is None else _position_text(origin.event.position),
            "-" if origin.event is None else operation_name(origin.event.op),
        ]
        for origin in _origins(explanation, None)
    ]
    if rows:
        click.echo()
        render.table(["column", "value", "decided at", "by"], rows)


def _value(explanation: Explanation, origin: Origin) -> str:
    if origin.column in explanation.contract.key:
        return "part of the key"
    if not origin.resolved:
        return "unresolved"
    text = "NULL" if origin.value is None else repr(origin.value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _origin_facts(explanation: Explanation, origin: Origin) -> Iterator[tuple[str, str]]:
    policy = explanation.contract.column(origin.column)
    if policy.personal:
        yield "personal", f"the policy is {policy.pii}: this is what the lake holds"
    event = origin.event
    if event is None:
        yield "unresolved", "no accepted event carried the column, and none in quarantine did"
        return
    if not origin.resolved:
        yield "unresolved", f"{_event(event)} is in quarantine ({event.facts['reason']})"
        yield "", f"Look: omnisupport-ingest quarantine show {explanation.ref(event)}"
    else:
        yield "decided by", _event(event) + (", under the old key of the row" if origin.old_key else "")
        if origin.by_default:
            yield (
                "default",
                "the event is older than the column, so it has what the contract says of such rows",
            )
    facts, landed = event.facts, explanation.landed[event.batch_id]
    if facts["tx_id"] is not None:
        yield "transaction", f"{facts['tx_id']}, change LSN {_lsn(facts['lsn'])}"
    yield "landing", f"batch {event.batch_id}, landed {render.clock(event.landed_at)}"
    for part in (landed.origin, landed.file_of(event)):
        if part is not None:
            yield "", part
    if facts["file_name"] is not None and facts["file_row"] is not None:
        yield "", f"{facts['file_name']}, line {facts['file_row']}"
    for each in explanation.checkpoints:
        if each.window in ("", event.window):
            yield each.layer, f"{_window(each.window)}run {each.run_id}, {render.clock(each.committed_at)}"
    for review in explanation.reviews.get(explanation.ref(event), ()):
        yield (
            "review",
            f"{review.decision} by {review.reviewer}, {render.clock(review.reviewed_at)}: {review.why}",
        )


def _window(window: str) -> str:
    return f"window {window}, " if window else ""


def _show_events(explanation: Explanation, column: str | None) -> None:
    rows = [
        [
            _position_text(each.position),
            operation_name(each.op),
            render.clock(each.source_ts)[:19],
            each.batch_id,
            _why(explanation, each, column),
        ]
        for each in explanation.events
        if each.key is not None or column is not None or each.op == "t"
    ]
    for copy in explanation.copies:
        times = f" ({copy.copies} times)" if copy.copies > 1 else ""
        reason = f"duplicate: one at this position is kept{times}" if copy.duplicate else "not judged yet"
        landed = render.clock(copy.landed_at)[:19]
        rows.append([_position_text(copy.position), "copy", landed, copy.batch_id, reason])
    render.table(["position", "event", "committed (UTC)", "batch", "what became of it"], rows)


def _why(explanation: Explanation, event: KeyEvent, column: str | None) -> str:
    parts = []
    if column is not None:
        role = _role(explanation, event, column)
        parts.append(_WHY.get(role, role))
    elif event.withheld:
        parts.append("in quarantine")
    else:
        parts.append("accepted")
    if event.withheld:
        parts.append(f"{event.facts['reason']}, {event.facts['review_state'] or 'open'}")
    if (event.window, event.position) in explanation.late:
        parts.append("late")
    for review in explanation.reviews.get(explanation.ref(event), ()):
        parts.append(f"{review.decision} by {review.reviewer}")
    return "; ".join(parts)


def _role(explanation: Explanation, event: KeyEvent, column: str) -> str:
    if explanation.origins is None:
        return "quarantined" if event.withheld else "accepted"
    if column in explanation.contract.key:
        return "part of the key"
    return explanation.origins.role(event, column).value


def _event(event: KeyEvent) -> str:
    at = _position_text(event.position)
    return f"{operation_name(event.op)} at {at}, committed {render.clock(event.source_ts)}"


def _position_text(position: tuple[int, int, int]) -> str:
    return str(Position(position[0], Lsn(position[1]), position[2]))


def _lsn(value: int | None) -> str:
    return "unknown" if value is None else str(Lsn(value))
