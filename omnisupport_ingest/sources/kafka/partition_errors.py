"""Errors that the client reports of one partition: which of them stop it alone, and what a person can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.kafka.errors import KafkaRefused, KafkaUnreachable
from omnisupport_ingest.sources.kafka.offsets import Partition

if TYPE_CHECKING:
    from confluent_kafka import KafkaError


def stops_alone(source: str, place: Partition, error: KafkaError) -> IngestError | None:
    """Return why the partition ``place`` cannot be read; None if ``error`` is of the whole cluster."""
    from confluent_kafka import KafkaError as Codes

    code, told = error.code(), error.str()
    where = f"{place[0]}[{place[1]}] of {source}"
    if code in (Codes.UNKNOWN_TOPIC_OR_PART, Codes._UNKNOWN_TOPIC, Codes._UNKNOWN_PARTITION):
        return KafkaUnreachable(
            f"{where} is not on the cluster any more ({told}): it was deleted while it was read, or the user "
            "of this client may no longer describe it.",
            fix="If it was deleted on purpose, do nothing. Else make it again, or grant the user to describe "
            "the topic (an ACL).",
        )
    if code == Codes.TOPIC_AUTHORIZATION_FAILED:
        return KafkaRefused(
            f"{where} may not be read by the user of this client ({told}).",
            fix=f"Grant that user READ on the topic {place[0]} (an ACL), or take the topic out of "
            "kafka.topics in the definition.",
        )
    if code == Codes.MSG_SIZE_TOO_LARGE:
        return KafkaRefused(
            f"{where} has a record that is larger than this client fetches ({told}).",
            fix="Raise fetch.message.max.bytes, fetch.max.bytes and receive.message.max.bytes in "
            "kafka.settings of the definition above the size of the record.",
        )
    if code in (Codes._BAD_COMPRESSION, Codes._NOT_IMPLEMENTED, Codes._BAD_MSG, Codes.INVALID_MSG):
        return KafkaRefused(
            f"{where} has records that this client cannot decode ({told}).",
            fix="Read them with another client (kafka-console-consumer). If that works, have the producer "
            "use another compression (compression.type); else the broker's copy is damaged.",
        )
    return None
