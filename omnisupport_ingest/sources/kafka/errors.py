"""Errors of topics and of reading them. None of them affects what has already landed."""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError


class KafkaRefused(IngestError):
    """The definition of a Kafka source, or a topic of it, cannot be read as it is.

    Fix: Correct what the message names, then sync again.
    """

    exit_code = 5


class KafkaUnreachable(IngestError):
    """The Kafka cluster does not answer, or refuses this client.

    Fix: See that it is up, and that ``kafka.settings`` in the definition are right. The next sync goes on
    where this one stood.
    """

    exit_code = 4


class RecordsGone(IngestError):
    """The cluster deleted records of a topic before they were read: a gap.

    Fix: Have the connector read its tables again, then go on behind the gap: ``omnisupport-ingest sync NAME
    --accept-gap "why"``.
    """

    exit_code = 7


class TopicReplaced(IngestError):
    """A topic was made anew, or its cluster was put back: it is not the one of which records have landed.

    Fix: If what it holds now is later, begin an epoch: ``omnisupport-ingest sync NAME --new-epoch "what
    happened"``.
    """

    exit_code = 7


class RecordRefused(IngestError):
    """A record cannot land, and its partition stops before it. Other partitions go on, unless the record
    shows that its connector was set up anew.

    Fix: Correct what writes such records, or let them wait in quarantine (``events.odd_lines`` of the
    definition). If the connector was set up anew, begin an epoch: ``omnisupport-ingest sync NAME --new-epoch
    "what happened"``.
    """


class KafkaPaused(IngestError):
    """Somebody has paused a source of Kafka's.

    Fix: End the pause: ``omnisupport-ingest source resume NAME``.
    """
