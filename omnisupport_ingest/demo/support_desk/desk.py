"""The support desk as its traffic sees it: the next keys, and rows that go with them."""

from __future__ import annotations

from typing import cast
from uuid import UUID

import psycopg2

from omnisupport_ingest.demo.actor import Actor, Key
from omnisupport_ingest.demo.rows import LONG_TEXT
from omnisupport_ingest.demo.support_desk.rows import TABLES, RowMaker


class Desk(Actor):
    """A connection to the support desk. Every run makes organizations."""

    def __init__(self, connection: psycopg2.extensions.connection, seed: int) -> None:
        super().__init__(connection, seed, TABLES, "support.organizations_id_seq")
        self.rows = RowMaker(self.rng, first_second=self.first_second)
        self._next_ticket = 1 + max((cast(int, key[0]) for key in self.keys["tickets"].live), default=0)
        self._next_agent = 1 + len(self.keys["agents"].live)
        self._next_comment: dict[int, int] = {}
        for ticket, number in cast(list[tuple[int, int]], self.keys["ticket_comments"].live):
            self._next_comment[ticket] = max(self._next_comment.get(ticket, 1), number + 1)

    def renumber(self, table: str, old: Key, new: Key) -> None:
        """Give a row a new key, and touch no other column that is stored out of line."""
        self.change_key(table, old, new, self.rows.now() if table == "tickets" else None)

    def insert_organization(self) -> Key:
        self.insert("organizations", [self.rows.organization()])
        self.cursor.execute("SELECT currval('support.organizations_id_seq')")
        key = tuple(self.one())
        self.keys["organizations"].add([key])
        return key

    def new_ticket_key(self) -> Key:
        self._next_ticket += 1
        return (self._next_ticket - 1,)

    def new_comment_key(self, ticket: object) -> Key:
        number = self._next_comment.get(cast(int, ticket), 1)
        self._next_comment[cast(int, ticket)] = number + 1
        return (ticket, number)

    def new_uuid(self) -> UUID:
        return UUID(int=self.rng.getrandbits(128), version=4)

    def new_agent_handle(self) -> str:
        """Return a handle with a random part, so that it differs from those before a TRUNCATE."""
        self._next_agent += 1
        return f"agent-{self._next_agent:04d}-{self.rng.getrandbits(32):08x}"

    def new_row(self, table: str, key: Key) -> tuple[object, ...]:
        """Return a new row of customers, tickets or ticket_comments with ``key``."""
        if table == "ticket_comments":
            return self.rows.comment(cast(tuple[int, int], key))
        organization = cast(int, self.rng.choice(self.keys["organizations"].live)[0])
        if table == "customers":
            return self.rows.customer(organization, key=cast(str, key[0]))
        return self.rows.ticket(cast(int, key[0]), organization, self._any("customers"), self._any("agents"))

    def _any(self, table: str) -> str | None:
        live = self.keys[table].live
        return cast(str, self.rng.choice(live)[0]) if live and self.rng.random() < 0.9 else None

    def with_long_body(self, table: str, count: int) -> list[Key]:
        """Return up to ``count`` keys of rows whose body is stored out of line, the first ones."""
        named_table = self.tables[table]
        return self.rows_of(
            f"SELECT {named_table.key_columns} FROM {named_table.name} WHERE octet_length(body) > %s "
            f"ORDER BY {named_table.key_columns} DESC LIMIT %s",
            (LONG_TEXT, count),
        )
