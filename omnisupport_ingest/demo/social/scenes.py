"""The scenes of every workload of the social network: cases that change data capture often gets wrong.

Keys change when accounts are merged, in tables with a key of two columns. Nothing is truncated here.
"""

from __future__ import annotations

from omnisupport_ingest.demo.actor import WorkloadReport
from omnisupport_ingest.demo.domain import Scene
from omnisupport_ingest.demo.rows import AWKWARD_TEXTS, ROLLED_BACK
from omnisupport_ingest.demo.social import traffic
from omnisupport_ingest.demo.social.network import Network
from omnisupport_ingest.demo.social.rows import TABLES

_FULL_NAME = TABLES["users"].columns.index("full_name")


def somebody_joins(network: Network) -> None:
    """One transaction over five tables, with two long posts that later scenes rely on."""
    with network.transaction():
        [user] = network.join(1)
        posts = network.add_posts(user[0], 2, network.rows.long_text())
        network.add_pairs("follows", [(user[0], network.keys["users"].live[0][0])])
        network.add_pairs("likes", [(user[0], posts[0][0])])
        traffic.comment(network, 1)


def people_write_anything(network: Network) -> None:
    with network.transaction():
        for text in AWKWARD_TEXTS:
            [user] = network.join(1)
            network.update("users", "full_name = v1, interests = v2", [(user, (text, [text, None, "plain"]))])
            network.add_posts(user[0], 1, text)
        network.record(WorkloadReport(awkward_texts=2 * len(AWKWARD_TEXTS)))


def accounts_are_closed_and_one_returns(network: Network) -> None:
    """Soft-delete users and some of their posts in one transaction; then one account is alive again."""
    leaving = network.rows_of("SELECT id FROM social.users WHERE deleted_at IS NULL ORDER BY id LIMIT 2")
    written = network.rows_of(
        "SELECT id FROM social.posts WHERE user_id = ANY(%s) AND deleted_at IS NULL ORDER BY id LIMIT 5",
        ([key[0] for key in leaving],),
    )
    with network.transaction():
        now = network.rows.now()
        count = 0
        for table, keys in (("users", leaving), ("posts", written)):
            rows = [(key, (now,)) for key in keys]
            count += network.update(table, "deleted_at = v1, updated_at = v1", rows)
        network.record(WorkloadReport(soft_deletes=count))
    with network.transaction():
        returning = [(leaving[0], (None, network.rows.now()))]
        count = network.update("users", "deleted_at = v1::timestamptz, updated_at = v2", returning)
        network.record(WorkloadReport(undeletes=count))


def a_post_goes_viral(network: Network) -> None:
    """Change the same row many times, in one transaction and in the next; everybody likes it."""
    with network.transaction():
        [post] = network.add_posts(None, 1)
    fans = [(key[0], post[0]) for key in network.keys["users"].some(network.rng, 12)]
    with network.transaction():
        for fan in fans:
            network.add_pairs("likes", [fan])
            network.update("posts", "score = v1::numeric", [(post, (network.rows.score(),))])
    with network.transaction():
        network.update("posts", "score = v1::numeric", [(post, (None,))])
        network.record(WorkloadReport(updates_to_null=1))


def long_posts_are_left_alone_and_set(network: Network) -> None:
    """Change nothing but the visibility; then set another long content, and NULL."""
    first, second = network.with_long_content(2)
    with network.transaction():
        count = network.update(
            "posts", "visibility = v1::social.visibility", [(first, ("private",)), (second, ("public",))]
        )
        network.record(WorkloadReport(updates_with_unsent_body=count))
    with network.transaction():
        count = network.update("posts", "content = v1", [(first, (network.rows.long_text(),))])
        count += network.update("posts", "content = v1::text", [(second, (None,))])
        count += network.update("posts", "content = v1", [(second, (network.rows.long_text(),))])
        network.record(WorkloadReport(updates_of_long_body=count, updates_to_null=1))


def likes_are_taken_back_and_given_again(network: Network) -> None:
    """Delete and insert the same key of two columns: in one transaction, in two, and born and gone within
    one."""
    likes = network.keys["likes"]
    with network.transaction():
        [pair] = likes.some(network.rng, 1)
        network.delete("likes", [pair])
        network.insert("likes", [network.rows.like(pair)])
        [passing] = network.new_pairs("likes", 1)
        network.insert("likes", [network.rows.like(passing)])
        network.delete("likes", [passing])
        network.record(WorkloadReport(reinserts=1))
    with network.transaction():
        traffic.unlike(network, 2)
        traffic.unfollow(network, 1)
    with network.transaction():
        traffic.like_again(network, len(likes.gone))


def two_accounts_become_one(network: Network) -> None:
    """Move follows and likes of one account to another: one column of a two-column key changes."""
    with network.transaction():
        [kept] = network.join(1)
    [merged] = network.keys["follows"].some(network.rng, 1)
    old = merged[0]
    with network.transaction():
        for table in ("follows", "likes"):
            for key in [each for each in network.keys[table].live if each[0] == old][:10]:
                target = (kept[0], key[1])
                network.change_key(table, key, target)
                network.keys[table].rename(key, target)


def a_follow_is_turned_round(network: Network) -> None:
    """Change both columns of a key at once."""
    follows = network.keys["follows"]
    old = next(key for key in follows.live if (key[1], key[0]) not in follows)
    with network.transaction():
        network.change_key("follows", old, (old[1], old[0]))
        follows.rename(old, (old[1], old[0]))


def somebody_is_forgotten(network: Network) -> None:
    """Delete the newest user for good, with everything that is theirs, in one transaction."""
    user = network.keys["users"].live[-1]
    with network.transaction():
        for table, columns in (
            ("likes", ("user_id",)),
            ("comments", ("user_id",)),
            ("follows", ("follower_id", "followee_id")),
            ("posts", ("user_id",)),
        ):
            named_table = TABLES[table]
            named = " OR ".join(f"{column} = %s" for column in columns)
            keys = network.rows_of(
                f"SELECT {named_table.key_columns} FROM {named_table.name} WHERE {named} ORDER BY "
                f"{named_table.key_columns}",
                user * len(columns),
            )
            network.delete(table, keys)
            network.keys[table].kill_those(keys)
        network.delete("users", [user])
        network.keys["users"].kill_those([user])


def minds_are_changed(network: Network) -> None:
    """Roll back a whole transaction; then roll back a savepoint inside one that commits."""
    with network.rolled_back_transaction():
        _regret(network)
        network.delete("likes", network.keys["likes"].some(network.rng, 3))
    with network.transaction():
        traffic.rank_posts(network, 1)
        with network.rolled_back_savepoint():
            _regret(network)
            network.delete("comments", network.keys["comments"].some(network.rng, 2))
        traffic.comment(network, 1)


BEFORE_THE_MIDDLE: tuple[Scene[Network], ...] = (
    somebody_joins,
    people_write_anything,
    accounts_are_closed_and_one_returns,
    a_post_goes_viral,
    long_posts_are_left_alone_and_set,
)
AFTER_THE_MIDDLE: tuple[Scene[Network], ...] = (
    likes_are_taken_back_and_given_again,
    two_accounts_become_one,
    a_follow_is_turned_round,
    somebody_is_forgotten,
    minds_are_changed,
)


def _regret(network: Network) -> None:
    """Insert rows without recording their keys, because they will be rolled back."""
    user = list(network.rows.user())
    user[_FULL_NAME] = ROLLED_BACK
    network.insert("users", [tuple(user)])
    pair = network.new_pairs("likes", 1)
    network.insert("likes", [network.rows.like(key) for key in pair])
