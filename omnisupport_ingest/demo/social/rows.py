"""Tables and rows of the social network, made from a random generator, and its first rows."""

from __future__ import annotations

import random
from datetime import date
from decimal import Decimal
from uuid import UUID

from psycopg2.extensions import cursor as Cursor
from psycopg2.extras import Json

from omnisupport_ingest.demo.actor import Key, Table
from omnisupport_ingest.demo.rows import Rows

SCHEMA = "social"


def _table(name: str, key: tuple[tuple[str, str], ...], *columns: str) -> Table:
    return Table(f"{SCHEMA}.{name}", columns, key)


TABLES = {
    "users": _table(
        "users",
        (("id", "bigint"),),
        *("username", "email", "full_name", "born_on", "interests", "is_private"),
        *("created_at", "updated_at", "deleted_at"),
    ),
    "posts": _table(
        "posts",
        (("id", "bigint"),),
        *("id", "user_id", "content", "media", "visibility", "score"),
        *("created_at", "updated_at", "deleted_at"),
    ),
    "follows": _table(
        "follows",
        (("follower_id", "bigint"), ("followee_id", "bigint")),
        *("follower_id", "followee_id", "is_muted", "created_at"),
    ),
    "comments": _table(
        "comments",
        (("id", "uuid"),),
        *("id", "post_id", "user_id", "reply_to", "content", "created_at", "updated_at", "deleted_at"),
    ),
    "likes": _table(
        "likes",
        (("user_id", "bigint"), ("post_id", "bigint")),
        *("user_id", "post_id", "reaction", "created_at"),
    ),
}
"""The tables, with the columns of the rows below; a user's id is given by the database."""

VISIBILITIES = ("public", "followers", "private")
REACTIONS = ("like", "love", "laugh", "sad", "angry")

_NAMES = ("Ama Boateng", "Björn Lind", "Chloë O'Hara", "Deniz Kaya", "Émile Roux", "Fatima Zahra", None)
_INTERESTS = ("climbing", "bread", 'the "small" things', "a,b", "NULL", "東京", None)
_POSTS = ("Good morning!", "Look at this", "Who is coming tonight?", "No words.", "#throwback")
_COMMENTS = ("So true", "Where is that?", "+1", "Not like this …", "😂😂😂")
_PROSE = (
    "We left before the sun was up, took the slow road over the pass and stopped wherever there was coffee. "
    "Nobody had a map, so we asked; nobody agreed, so we guessed. Schön war's! "
) * 60


class RowMaker(Rows):
    """Makes the rows of the social network."""

    prose = _PROSE

    def user(self) -> tuple[object, ...]:
        now = self.now()
        handle = f"{self._rng.getrandbits(32):08x}"
        return (
            f"user_{handle}",
            f"{handle}@example.com",
            self.text(("Sam",)) if self._rng.random() < 0.3 else self._rng.choice(_NAMES),
            self._rng.choice((None, date(1968, 2, 29), date(1999, 12, 31), date(2007, 6, 1))),
            self.interests(),
            self._rng.random() < 0.2,
            now,
            now,
            None,
        )

    def interests(self) -> list[str | None] | None:
        """Return NULL, or an array of up to three elements, some of them NULL, quoted or with commas."""
        if self._rng.random() < 0.2:
            return None
        return [self._rng.choice(_INTERESTS) for _ in range(self._rng.randrange(4))]

    def content(self) -> str | None:
        """Return a content: one in five is long, one in ten (a picture alone) is NULL, the rest is short."""
        draw = self._rng.random()
        if draw < 0.2:
            return self.long_text()
        return None if draw < 0.3 else self.text(_POSTS)

    def score(self) -> Decimal | None:
        return None if self._rng.random() < 0.1 else Decimal(self._rng.randrange(10**9)) / 10_000

    def post(self, key: object, user: object) -> tuple[object, ...]:
        now = self.now()
        media = [{"url": "https://example.com/p.jpg", "width": self._rng.randrange(4000), "alt": 'a "b" \\'}]
        return (
            key,
            user,
            self.content(),
            Json(media) if self._rng.random() < 0.4 else None,
            self._rng.choice(VISIBILITIES),
            self.score(),
            now,
            now,
            None,
        )

    def comment_text(self) -> str:
        return self.text(_COMMENTS)

    def comment(self, key: object, post: object, user: object, reply_to: object) -> tuple[object, ...]:
        now = self.now()
        return (key, post, user, reply_to, self.comment_text(), now, now, None)

    def follow(self, key: Key) -> tuple[object, ...]:
        return (*key, self._rng.random() < 0.1, self.now())

    def like(self, key: Key) -> tuple[object, ...]:
        return (*key, self._rng.choice(REACTIONS), self.now())

    def uuid(self) -> str:
        return str(UUID(int=self._rng.getrandbits(128), version=4))


SKEW = 4
"""From a list in order of fame, the element at ``len * random ** SKEW`` is chosen: a hundredth of the posts
gets a third of the likes, and a tenth more than half."""


def famous(rng: random.Random, keys: list[Key]) -> object:
    """Return the first column of one of ``keys``, which are in order of fame."""
    return keys[int(len(keys) * rng.random() ** SKEW)][0]


def fill(cursor: Cursor, seed: int, posts: int) -> None:
    """Insert ``posts``: a user for every four of them, and for each two comments, two follows and four
    likes."""
    rng = random.Random(f"seed {seed}")  # noqa: S311 (repeatable, not secret)
    rows = RowMaker(rng)
    users: list[Key] = [(number,) for number in range(1, posts // 4 + 6)]
    TABLES["users"].insert(cursor, [rows.user() for _ in users])
    keys: list[Key] = [(number,) for number in range(1, posts + 1)]
    TABLES["posts"].insert(cursor, [rows.post(key[0], famous(rng, users)) for key in keys])
    follows = {(rng.choice(users)[0], famous(rng, users)): None for _ in range(2 * posts)}
    TABLES["follows"].insert(cursor, [rows.follow(key) for key in follows if key[0] != key[1]])
    comments = [
        rows.comment(rows.uuid(), famous(rng, keys), rng.choice(users)[0], None) for _ in range(2 * posts)
    ]
    TABLES["comments"].insert(cursor, comments)
    likes = {(rng.choice(users)[0], famous(rng, keys)): None for _ in range(4 * posts)}
    TABLES["likes"].insert(cursor, [rows.like(key) for key in likes])
