"""Ordinary traffic of the support desk: what happens on any day, a few rows or a few hundred at a time."""

from __future__ import annotations

from collections.abc import Mapping

from omnisupport_ingest.demo.actor import WorkloadReport
from omnisupport_ingest.demo.domain import Action
from omnisupport_ingest.demo.support_desk.desk import Desk
from omnisupport_ingest.demo.support_desk.rows import PLANS, STATUSES


def open_tickets(desk: Desk, count: int) -> None:
    keys = [desk.new_ticket_key() for _ in range(count)]
    desk.insert("tickets", [desk.new_row("tickets", key) for key in keys])
    desk.keys["tickets"].add(keys)


def write_comments(desk: Desk, count: int) -> None:
    tickets = desk.keys["tickets"].live
    keys = [desk.new_comment_key(desk.rng.choice(tickets)[0]) for _ in range(count)]
    desk.insert("ticket_comments", [desk.new_row("ticket_comments", key) for key in keys])
    desk.keys["ticket_comments"].add(keys)


def register_customers(desk: Desk, count: int) -> None:
    keys = [(str(desk.new_uuid()),) for _ in range(count)]
    desk.insert("customers", [desk.new_row("customers", key) for key in keys])
    desk.keys["customers"].add(keys)


def move_tickets_along(desk: Desk, count: int) -> None:
    """Change status, priority and rating. The body is not touched, so a long one is not sent."""
    desk.update(
        "tickets",
        "status = v1::support.ticket_status, priority = v2::smallint, "
        "satisfaction = v3::double precision, updated_at = v4",
        [
            (
                key,
                (
                    desk.rng.choice(STATUSES),
                    desk.rng.choice((None, 1, 2, 3)),
                    desk.rng.choice((None, 1.5, 4.0, 0.1)),
                    desk.rows.now(),
                ),
            )
            for key in desk.keys["tickets"].some(desk.rng, count)
        ],
    )


def rewrite_tickets(desk: Desk, count: int) -> None:
    desk.update(
        "tickets",
        "body = v1::text, updated_at = v2",
        [(key, (desk.rows.body(), desk.rows.now())) for key in desk.keys["tickets"].some(desk.rng, count)],
    )


def publish_comments(desk: Desk, count: int) -> None:
    chosen = desk.keys["ticket_comments"].some(desk.rng, count)
    desk.update("ticket_comments", "is_public = v1", [(key, (desk.rng.random() < 0.9,)) for key in chosen])


def bill_customers(desk: Desk, count: int) -> None:
    desk.update(
        "customers",
        "lifetime_value = v1::numeric, tags = v2::text[], full_name = v3::text, updated_at = v4",
        [
            (key, (desk.rows.amount(10), desk.rows.tags(), desk.rows.text(("Sam", "Kim")), desk.rows.now()))
            for key in desk.keys["customers"].some(desk.rng, count)
        ],
    )


def close_and_reopen_accounts(desk: Desk, count: int) -> None:
    """Soft-delete customers, or undo that, whatever state they are in."""
    desk.update(
        "customers",
        "deleted_at = v1::timestamptz, updated_at = v2",
        [
            (key, (desk.rng.choice((None, desk.rows.now())), desk.rows.now()))
            for key in desk.keys["customers"].some(desk.rng, count)
        ],
    )


def renumber_comments(desk: Desk, count: int) -> None:
    """Change primary keys; the bodies are not touched."""
    comments = desk.keys["ticket_comments"]
    changes = [(old, desk.new_comment_key(old[0])) for old in comments.some(desk.rng, count)]
    done = desk.update(
        "ticket_comments", "comment_no = v1::integer", [(old, (new[1],)) for old, new in changes]
    )
    desk.record(WorkloadReport(key_changes=done))
    for old, new in changes:
        comments.rename(old, new)


def change_plans(desk: Desk, count: int) -> None:
    desk.update(
        "organizations",
        "plan = v1::support.plan, seats = v2::integer, updated_at = v3",
        [
            (key, (desk.rng.choice(PLANS), desk.rng.choice((None, 5, 500)), desk.rows.now()))
            for key in desk.keys["organizations"].some(desk.rng, count)
        ],
    )


def delete_comments(desk: Desk, count: int) -> None:
    desk.delete("ticket_comments", desk.keys["ticket_comments"].kill(desk.rng, count))


def delete_tickets(desk: Desk, count: int) -> None:
    desk.delete("tickets", desk.keys["tickets"].kill(desk.rng, count))


def restore_tickets(desk: Desk, count: int) -> None:
    """Insert rows under keys that were deleted before."""
    keys = desk.keys["tickets"].revive(count)
    desk.insert("tickets", [desk.new_row("tickets", key) for key in keys])
    desk.record(WorkloadReport(reinserts=len(keys)))


ORDINARY: Mapping[Action[Desk], int] = {
    open_tickets: 14,
    write_comments: 16,
    register_customers: 5,
    move_tickets_along: 26,
    rewrite_tickets: 6,
    publish_comments: 10,
    bill_customers: 10,
    close_and_reopen_accounts: 2,
    renumber_comments: 1,
    change_plans: 2,
    delete_comments: 4,
    delete_tickets: 4,
    restore_tickets: 3,
}
"""Ordinary actions → their share."""
