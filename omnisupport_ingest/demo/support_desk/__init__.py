"""The support desk: a small, realistic source database and the traffic on it."""

from omnisupport_ingest.demo.domain import Domain
from omnisupport_ingest.demo.support_desk import scenes
from omnisupport_ingest.demo.support_desk.desk import Desk
from omnisupport_ingest.demo.support_desk.rows import SCHEMA, fill
from omnisupport_ingest.demo.support_desk.traffic import ORDINARY

SUPPORT_DESK = Domain(
    name="support_desk",
    title="the support desk",
    schema=SCHEMA,
    package=__name__,
    contracts="contracts/data",
    shown="tickets",
    fill=fill,
    size=3000,
    actor=Desk,
    traffic=ORDINARY,
    before_the_middle=scenes.BEFORE_THE_MIDDLE,
    after_the_middle=scenes.AFTER_THE_MIDDLE,
)
