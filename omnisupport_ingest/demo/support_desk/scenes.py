"""The scenes of every workload of the support desk: cases that change data capture often gets wrong."""

from __future__ import annotations

from typing import cast

from omnisupport_ingest.demo.actor import Key, WorkloadReport
from omnisupport_ingest.demo.domain import Scene
from omnisupport_ingest.demo.rows import AWKWARD_TEXTS, ROLLED_BACK
from omnisupport_ingest.demo.support_desk import traffic
from omnisupport_ingest.demo.support_desk.desk import Desk
from omnisupport_ingest.demo.support_desk.rows import TABLES

_FULL_NAME = TABLES["customers"].columns.index("full_name")
_TAGS = TABLES["customers"].columns.index("tags")
_TICKET_BODY = TABLES["tickets"].columns.index("body")
_COMMENT_BODY = TABLES["ticket_comments"].columns.index("body")


def a_new_organization_signs_up(desk: Desk) -> None:
    """One transaction over four tables, with two long bodies that later scenes rely on."""
    with desk.transaction():
        desk.insert_organization()
        traffic.register_customers(desk, 2)
        for _ in range(2):
            ticket = desk.new_ticket_key()
            _insert(desk, "tickets", ticket, _TICKET_BODY, desk.rows.long_text())
            comment = desk.new_comment_key(ticket[0])
            _insert(desk, "ticket_comments", comment, _COMMENT_BODY, desk.rows.long_text())


def people_have_awkward_names(desk: Desk) -> None:
    with desk.transaction():
        for text in AWKWARD_TEXTS:
            key = (str(desk.new_uuid()),)
            row = list(desk.new_row("customers", key))
            row[_FULL_NAME], row[_TAGS] = text, [text, None, "plain"]
            desk.insert("customers", [tuple(row)])
            desk.keys["customers"].add([key])
        desk.record(WorkloadReport(awkward_texts=len(AWKWARD_TEXTS)))


def customers_leave_and_one_returns(desk: Desk) -> None:
    """Use the source's own soft delete: ``deleted_at`` is set, and for one customer is NULL again."""
    desk.cursor.execute("SELECT id FROM support.customers WHERE deleted_at IS NULL ORDER BY id LIMIT 2")
    leaving = [tuple(row) for row in desk.cursor.fetchall()]
    with desk.transaction():
        now = desk.rows.now()
        count = desk.update("customers", "deleted_at = v1, updated_at = v1", [(k, (now,)) for k in leaving])
        desk.record(WorkloadReport(soft_deletes=count))
    with desk.transaction():
        returning = [(leaving[0], (None, desk.rows.now()))]
        count = desk.update("customers", "deleted_at = v1::timestamptz, updated_at = v2", returning)
        desk.record(WorkloadReport(undeletes=count))


def values_become_unknown(desk: Desk) -> None:
    with desk.transaction():
        keys = [(key, (None,)) for key in desk.keys["customers"].some(desk.rng, 2)]
        count = desk.update("customers", "full_name = v1::text, tags = v1::text[], locale = v1::text", keys)
        desk.record(WorkloadReport(updates_to_null=count))


def long_bodies_are_left_alone_and_set(desk: Desk) -> None:
    """Change nothing but the status; then set another long body, a short one, and NULL."""
    first, second = desk.with_long_body("tickets", 2)
    with desk.transaction():
        count = desk.update("tickets", "status = v1::support.ticket_status", [(first, ("pending",))])
        desk.record(WorkloadReport(updates_with_unsent_body=count))
    with desk.transaction():
        count = desk.update("tickets", "body = v1", [(first, (desk.rows.long_text(),))])
        count += desk.update("tickets", "body = v1", [(second, ("Short now.",))])
        count += desk.update("tickets", "body = v1::text", [(second, (None,))])
        count += desk.update("tickets", "body = v1", [(second, (desk.rows.long_text(),))])
        desk.record(WorkloadReport(updates_of_long_body=count, updates_to_null=1))


def a_ticket_gets_another_number(desk: Desk) -> None:
    """Change a primary key with a long body unsent; the comments follow, one of them with a long body."""
    [old] = desk.with_long_body("tickets", 1)
    new = desk.new_ticket_key()
    moved = [key for key in desk.keys["ticket_comments"].live if key[0] == old[0]]
    with desk.transaction():
        desk.renumber("tickets", old, new)
        desk.keys["tickets"].rename(old, new)
        for key in moved:
            target = desk.new_comment_key(new[0])
            desk.renumber("ticket_comments", key, target)
            desk.keys["ticket_comments"].rename(key, target)
        desk.record(WorkloadReport(key_changes_with_unsent_body=1))


def a_comment_is_renumbered(desk: Desk) -> None:
    [old] = desk.with_long_body("ticket_comments", 1)
    new = desk.new_comment_key(old[0])
    with desk.transaction():
        desk.renumber("ticket_comments", old, new)
        desk.keys["ticket_comments"].rename(old, new)
        desk.record(WorkloadReport(key_changes_with_unsent_body=1))


def keys_are_swapped(desk: Desk) -> None:
    """Exchange the keys of two tickets and of two comments through a temporary key, bodies unsent."""
    tickets, comments = desk.with_long_body("tickets", 2), desk.with_long_body("ticket_comments", 2)
    with desk.transaction():
        _swap(desk, "tickets", tickets[0], tickets[1], (10**15,))
        _swap(desk, "ticket_comments", comments[0], comments[1], (comments[0][0], 2**31 - 1))


def rows_are_deleted_and_come_back(desk: Desk) -> None:
    """Delete rows and insert them again: in a later transaction, in the same one, and born and gone within
    one."""
    with desk.transaction():
        traffic.delete_tickets(desk, 2)
        traffic.delete_comments(desk, 1)
    with desk.transaction():
        traffic.restore_tickets(desk, len(desk.keys["tickets"].gone))
    with desk.transaction():
        [key] = desk.keys["tickets"].some(desk.rng, 1)
        desk.delete("tickets", [key])
        desk.insert("tickets", [desk.new_row("tickets", key)])
        desk.record(WorkloadReport(reinserts=1))
        passing = desk.new_ticket_key()
        desk.insert("tickets", [desk.new_row("tickets", passing)])
        desk.delete("tickets", [passing])


def minds_are_changed(desk: Desk) -> None:
    """Roll back a whole transaction; then roll back a savepoint inside one that commits.

    The rolled-back rows contain ``ROLLED_BACK``, so that a search downstream must not find it.
    """
    with desk.rolled_back_transaction():
        _insert_regretted(desk)
        desk.delete("tickets", desk.keys["tickets"].some(desk.rng, 3))
        desk.truncate("agents")
    with desk.transaction():
        traffic.move_tickets_along(desk, 1)
        with desk.rolled_back_savepoint():
            _insert_regretted(desk)
            desk.delete("ticket_comments", desk.keys["ticket_comments"].some(desk.rng, 2))
        traffic.write_comments(desk, 1)


def the_staff_is_replaced(desk: Desk) -> None:
    """TRUNCATE, then insert new agents, some with handles that existed before."""
    before = [cast(str, key[0]) for key in desk.keys["agents"].live]
    with desk.transaction():
        desk.truncate("agents")
    handles = before[:4] + [desk.new_agent_handle() for _ in range(4)]
    with desk.transaction():
        desk.insert("agents", [desk.rows.agent(handle) for handle in handles])
        desk.record(WorkloadReport(reinserts=len(before[:4])))
    desk.keys["agents"].begin_anew([(handle,) for handle in handles])


BEFORE_THE_MIDDLE: tuple[Scene[Desk], ...] = (
    a_new_organization_signs_up,
    people_have_awkward_names,
    customers_leave_and_one_returns,
    values_become_unknown,
    long_bodies_are_left_alone_and_set,
    a_ticket_gets_another_number,
)
AFTER_THE_MIDDLE: tuple[Scene[Desk], ...] = (
    the_staff_is_replaced,
    a_comment_is_renumbered,
    keys_are_swapped,
    rows_are_deleted_and_come_back,
    minds_are_changed,
)


def _insert(desk: Desk, table: str, key: Key, column: int, value: str) -> None:
    row = list(desk.new_row(table, key))
    row[column] = value
    desk.insert(table, [tuple(row)])
    desk.keys[table].add([key])


def _swap(desk: Desk, table: str, one: Key, other: Key, between: Key) -> None:
    desk.renumber(table, one, between)
    desk.renumber(table, other, one)
    desk.renumber(table, between, other)
    desk.record(WorkloadReport(key_swaps=1, key_changes_with_unsent_body=3))


def _insert_regretted(desk: Desk) -> None:
    """Insert rows without recording their keys, because they will be rolled back."""
    customer = list(desk.new_row("customers", (str(desk.new_uuid()),)))
    customer[_FULL_NAME] = ROLLED_BACK
    ticket = list(desk.new_row("tickets", desk.new_ticket_key()))
    ticket[TABLES["tickets"].columns.index("subject")] = ROLLED_BACK
    desk.insert("customers", [tuple(customer)])
    desk.insert("tickets", [tuple(ticket)])
