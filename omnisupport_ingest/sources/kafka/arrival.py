"""Which topics can be ordered by arrival: those of which a key never changes its partition.

Two partitions have no order in common, and neither have two topics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.manifest import OffsetSpan
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.kafka.errors import KafkaRefused
from omnisupport_ingest.sources.kafka.offsets import Held, Partition, replaced_topics


def check_arrival(
    source: str,
    held: Sequence[Held],
    landed: Mapping[Partition, OffsetSpan],
    handling: Handling,
    *,
    new_epoch: bool,
) -> set[str]:
    """Raise ``KafkaRefused`` for topics whose records have no order by arrival: two topics of one table, or a
    new partition, to which a key may have moved.

    Returns the topics whose new partitions a person explains by a new epoch: they were made anew, and no
    id can show it.
    """
    declared_anew: set[str] = set()
    known = {topic for topic, _ in landed}
    with_id = {topic for (topic, _), each in landed.items() if each.topic_id}
    replaced = replaced_topics(held, landed)
    of_table: dict[TableName, str] = {}
    for each in held:
        same = each.topic in known and each.topic not in replaced
        if same and each.place not in landed:
            if not new_epoch or each.topic in with_id:
                raise KafkaRefused(
                    f"The topic {each.topic} has a partition {each.partition} that it did not have, and "
                    "its records are ordered by arrival: a key may have moved there, and nothing says "
                    "which of its records is later.",
                    fix="Land it as a new source whose records carry a position or a commit time "
                    "(events.order position), or make the topic anew with all its partitions, and: "
                    f'omnisupport-ingest sync {source} --new-epoch "partitions added"',
                )
            declared_anew.add(each.topic)
        table = handling.table_of(each.topic)
        if table is None:
            continue
        other = of_table.setdefault((table.schema, table.table), each.topic)
        if other != each.topic:
            raise KafkaRefused(
                f"The topics {other} and {each.topic} are both of {table.schema}.{table.table}, and "
                "their records are ordered by arrival, which two topics have not in common.",
                fix="Take one of them in (kafka.topics), or map them to two tables (events.tables).",
            )
    return declared_anew
