"""The social network as its traffic sees it: who is famous, and which pairs do not exist yet."""

from __future__ import annotations

from typing import cast

import psycopg2

from omnisupport_ingest.demo.actor import Actor, Key
from omnisupport_ingest.demo.rows import LONG_TEXT
from omnisupport_ingest.demo.social.rows import TABLES, RowMaker, famous

_TRIES = 20
"""Most draws for a pair that does not exist yet: nearly everybody follows the famous."""


class Network(Actor):
    """A connection to the social network. In every run somebody joins."""

    def __init__(self, connection: psycopg2.extensions.connection, seed: int) -> None:
        super().__init__(connection, seed, TABLES, "social.users_id_seq")
        self.rows = RowMaker(self.rng, first_second=self.first_second)
        self._next_post = 1 + max((cast(int, key[0]) for key in self.keys["posts"].live), default=0)

    def anybody(self) -> object:
        """Return a user; all are equally likely."""
        return self.rng.choice(self.keys["users"].live)[0]

    def famous(self, table: str) -> object:
        """Return a user or post; the first ones are far more likely than the rest."""
        return famous(self.rng, self.keys[table].live)

    def join(self, count: int) -> list[Key]:
        """Insert ``count`` users; return their keys."""
        self.insert("users", [self.rows.user() for _ in range(count)])
        self.cursor.execute("SELECT currval('social.users_id_seq')")
        last = cast(int, self.one()[0])
        joined: list[Key] = [(last - count + 1 + number,) for number in range(count)]
        self.keys["users"].add(joined)
        return joined

    def new_post_key(self) -> Key:
        self._next_post += 1
        return (self._next_post - 1,)

    def add_posts(self, user: object, count: int, content: str | None = None) -> list[Key]:
        """Insert ``count`` posts of ``user`` (None: of the famous), with ``content`` if given; return their
        keys."""
        post_keys = [self.new_post_key() for _ in range(count)]
        rows = [self.rows.post(key[0], self.famous("users") if user is None else user) for key in post_keys]
        if content is not None:
            at = TABLES["posts"].columns.index("content")
            rows = [(*row[:at], content, *row[at + 1 :]) for row in rows]
        self.insert("posts", rows)
        self.keys["posts"].add(post_keys)
        return post_keys

    def new_pairs(self, table: str, count: int) -> list[Key]:
        """Return up to ``count`` keys of follows or likes that do not exist: a user, and a user or a post."""
        target = "users" if table == "follows" else "posts"
        pairs: dict[Key, None] = {}
        for _ in range(_TRIES * count):
            pair = (self.anybody(), self.famous(target))
            if pair not in self.keys[table] and (target == "posts" or pair[0] != pair[1]):
                pairs[pair] = None
            if len(pairs) == count:
                break
        return list(pairs)

    def add_pairs(self, table: str, pairs: list[Key]) -> None:
        """Insert follows or likes with the keys ``pairs``."""
        make = self.rows.follow if table == "follows" else self.rows.like
        self.insert(table, [make(pair) for pair in pairs])
        self.keys[table].add(pairs)

    def with_long_content(self, count: int) -> list[Key]:
        """Return the keys of up to ``count`` posts whose content is stored out of line."""
        return self.rows_of(
            "SELECT id FROM social.posts WHERE octet_length(content) > %s ORDER BY id DESC LIMIT %s",
            (LONG_TEXT, count),
        )
