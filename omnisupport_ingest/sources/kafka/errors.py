"""What can be wrong with topics and with reading them. What has landed stays, whatever it is."""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError


class KafkaRefused(IngestError):
    """The definition, or a topic, is not fit to be read."""

    exit_code = 5


class KafkaUnreachable(IngestError):
    """The cluster does not answer as it should; the next sync tries again."""

    exit_code = 4


class RecordsGone(IngestError):
    """Records were deleted before they were read: a gap."""

    exit_code = 7


class TopicReplaced(IngestError):
    """A topic is another one than that of which records have landed under its name."""

    exit_code = 7


class RecordRefused(IngestError):
    """A record at which its partition stops, until a person has said how to go on."""


class KafkaPaused(IngestError):
    """Somebody has paused the source."""
