"""A social network: users, posts, follows, comments and likes. Two of the tables have a key of two
columns."""

from omnisupport_ingest.demo.domain import Domain
from omnisupport_ingest.demo.social import scenes
from omnisupport_ingest.demo.social.network import Network
from omnisupport_ingest.demo.social.rows import SCHEMA, fill
from omnisupport_ingest.demo.social.traffic import ORDINARY

SOCIAL = Domain(
    name="social",
    title="the social network",
    schema=SCHEMA,
    package=__name__,
    contracts="contracts/social/data",
    shown="posts",
    fill=fill,
    size=2000,
    actor=Network,
    traffic=ORDINARY,
    before_the_middle=scenes.BEFORE_THE_MIDDLE,
    after_the_middle=scenes.AFTER_THE_MIDDLE,
)
