"""The social network's first rows: what a snapshot finds before any change is captured."""

from __future__ import annotations

import random

from psycopg2.extensions import cursor as Cursor

from omnisupport_ingest.demo.social.rows import TABLES, RowMaker
from omnisupport_ingest.demo.statements import Key

SKEW = 4
"""Of a list in order of fame, the one at ``len * random ** SKEW`` is chosen: a hundredth of the posts has a
third of the likes, and a tenth has more than half."""


def famous(rng: random.Random, keys: list[Key]) -> object:
    """The first column of one of ``keys``, which are in order of fame."""
    return keys[int(len(keys) * rng.random() ** SKEW)][0]


def fill(cursor: Cursor, seed: int, posts: int) -> None:
    """Insert ``posts``, a user for four of them, two comments, two follows and four likes for each."""
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
