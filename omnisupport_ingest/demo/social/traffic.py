"""Ordinary traffic of the social network: mostly likes and comments, most of them on the same few posts."""

from __future__ import annotations

from collections.abc import Mapping

from omnisupport_ingest.demo.actor import WorkloadReport
from omnisupport_ingest.demo.domain import Action
from omnisupport_ingest.demo.social.network import Network
from omnisupport_ingest.demo.social.rows import REACTIONS, VISIBILITIES


def sign_up(network: Network, count: int) -> None:
    network.join(count)


def write_posts(network: Network, count: int) -> None:
    network.add_posts(None, count)


def follow(network: Network, count: int) -> None:
    network.add_pairs("follows", network.new_pairs("follows", count))


def like(network: Network, count: int) -> None:
    network.add_pairs("likes", network.new_pairs("likes", count))


def comment(network: Network, count: int) -> None:
    keys = [(network.rows.uuid(),) for _ in range(count)]
    replies = network.keys["comments"].some(network.rng, 1)
    reply_to = replies[0][0] if replies and network.rng.random() < 0.3 else None
    network.insert(
        "comments",
        [network.rows.comment(key[0], network.famous("posts"), network.anybody(), reply_to) for key in keys],
    )
    network.keys["comments"].add(keys)


def rank_posts(network: Network, count: int) -> None:
    """Change the score, most often of popular posts. The content is not touched, so a long one is not
    sent."""
    hot = {network.famous("posts"): None for _ in range(count)}
    network.update(
        "posts",
        "score = v1::numeric, updated_at = v2",
        [((key,), (network.rows.score(), network.rows.now())) for key in hot],
    )


def edit_posts(network: Network, count: int) -> None:
    network.update(
        "posts",
        "content = v1::text, visibility = v2::social.visibility, updated_at = v3",
        [
            (key, (network.rows.content(), network.rng.choice(VISIBILITIES), network.rows.now()))
            for key in network.keys["posts"].some(network.rng, count)
        ],
    )


def edit_profiles(network: Network, count: int) -> None:
    network.update(
        "users",
        "full_name = v1::text, interests = v2::text[], is_private = v3, updated_at = v4",
        [
            (
                key,
                (
                    network.rows.text(("Sam", "Kim")),
                    network.rows.interests(),
                    network.rng.random() < 0.3,
                    network.rows.now(),
                ),
            )
            for key in network.keys["users"].some(network.rng, count)
        ],
    )


def edit_comments(network: Network, count: int) -> None:
    network.update(
        "comments",
        "content = v1, updated_at = v2",
        [
            (key, (network.rows.comment_text(), network.rows.now()))
            for key in network.keys["comments"].some(network.rng, count)
        ],
    )


def change_reactions(network: Network, count: int) -> None:
    network.update(
        "likes",
        "reaction = v1::social.reaction",
        [(key, (network.rng.choice(REACTIONS),)) for key in network.keys["likes"].some(network.rng, count)],
    )


def mute(network: Network, count: int) -> None:
    network.update(
        "follows",
        "is_muted = v1",
        [(key, (network.rng.random() < 0.5,)) for key in network.keys["follows"].some(network.rng, count)],
    )


def remove_and_restore(network: Network, count: int, table: str = "posts") -> None:
    """Soft-delete rows, or undo that, whatever state they are in."""
    network.update(
        table,
        "deleted_at = v1::timestamptz, updated_at = v2",
        [
            (key, (network.rng.choice((None, network.rows.now())), network.rows.now()))
            for key in network.keys[table].some(network.rng, count)
        ],
    )


def remove_and_restore_comments(network: Network, count: int) -> None:
    remove_and_restore(network, count, "comments")


def unlike(network: Network, count: int) -> None:
    network.delete("likes", network.keys["likes"].kill(network.rng, count))


def unfollow(network: Network, count: int) -> None:
    network.delete("follows", network.keys["follows"].kill(network.rng, count))


def like_again(network: Network, count: int, table: str = "likes") -> None:
    """Insert rows under keys that were deleted before."""
    keys = network.keys[table].revive(count)
    make = network.rows.like if table == "likes" else network.rows.follow
    network.insert(table, [make(key) for key in keys])
    network.record(WorkloadReport(reinserts=len(keys)))


def follow_again(network: Network, count: int) -> None:
    like_again(network, count, "follows")


ORDINARY: Mapping[Action[Network], int] = {
    like: 26,
    comment: 15,
    follow: 10,
    write_posts: 10,
    rank_posts: 10,
    sign_up: 3,
    edit_posts: 5,
    edit_profiles: 5,
    edit_comments: 4,
    change_reactions: 5,
    mute: 2,
    remove_and_restore: 3,
    remove_and_restore_comments: 3,
    unlike: 6,
    unfollow: 4,
    like_again: 3,
    follow_again: 2,
}
"""Ordinary actions → their share."""
