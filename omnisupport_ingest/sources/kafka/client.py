"""The client of a Kafka cluster, and what it reads from the cluster: topics, their ids, their offsets.

The library (``confluent-kafka``, librdkafka) is an optional dependency. The client assigns partitions to
itself and joins no consumer group, so no rebalance happens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from omnisupport_ingest.contracts.kafka_topics import OURS, KafkaTopics
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.kafka.errors import KafkaRefused, KafkaUnreachable
from omnisupport_ingest.sources.kafka.offsets import Held, Partition

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, TopicPartition
    from confluent_kafka.admin import AdminClient

ANSWER_SECONDS = 10.0
"""Seconds to wait for an answer of the cluster."""

_ID_SECONDS = 3.0
"""Seconds to wait for the ids of topics; an old cluster gives none."""

_CLOSE_SECONDS = 3.0
"""Seconds to wait for a connection to close; a reachable cluster takes milliseconds."""

_DEFAULTS = {
    "client.id": "omnisupport-ingest",
    "queued.max.messages.kbytes": "65536",
    "reconnect.backoff.max.ms": "2000",
}

_LOG = logging.getLogger(__name__)
_LOG.addHandler(logging.NullHandler())


class Cluster:
    """A connection to the cluster of one source. A context manager; the caller must close it."""

    def __init__(self, source: str, topics: KafkaTopics) -> None:
        """Raises ``KafkaRefused`` if the library is missing or refuses the settings, and
        ``ConnectionMissing``."""
        self._source, self._topics = source, topics
        self._problem = ""
        self._lock = threading.Lock()
        self._client_settings = topics.client_settings()
        self._asks: AdminClient | None = None
        self.consumer = make_consumer(source, topics, self._client_settings, on_error=self._note)

    def held(self) -> list[Held]:
        """Return what the cluster holds of every partition of the topics, in order. To be called before any
        partition is assigned.

        Raises ``KafkaUnreachable``, and ``KafkaRefused`` if the cluster has none of the topics. Of a
        partition that nobody leads it raises the reason.
        """
        found, unread = self.held_of_readable()
        for problem in unread.values():
            raise problem
        return found

    def held_of_readable(self) -> tuple[list[Held], dict[Partition, IngestError]]:
        """Return what ``held`` does of the partitions of which the cluster gives the offsets; and why it
        gives none of the others, such as those that nobody leads.

        Raises as ``held`` does if it gives those of no partition.
        """
        from confluent_kafka import KafkaException, TopicPartition

        try:
            there = self.consumer.list_topics(timeout=ANSWER_SECONDS).topics
            names = sorted(name for name in there if self._topics.chooses(name))
            if not names:
                raise KafkaRefused(
                    f"The cluster of {self._source} has no topic that is {' or '.join(self._topics.topics)}.",
                    fix="Correct kafka.topics in its definition, start the connector, or grant its user to "
                    "describe the topics.",
                )
            for name in names:
                if there[name].error is not None:
                    raise KafkaException(there[name].error)
            ids = self._ids(names)
            places = [
                TopicPartition(name, number) for name in names for number in sorted(there[name].partitions)
            ]
            offsets, problems = self._offsets(places)
        except KafkaException as problem:
            raise self._failed(problem.args[0]) from None
        if not offsets:
            raise self._failed(next(iter(problems.values())))
        return (
            [Held(*place, low, end, ids.get(place[0])) for place, (low, end) in offsets.items()],
            {place: self._partition_fault(place, problem) for place, problem in problems.items()},
        )

    def _failed(self, problem: object) -> KafkaUnreachable:
        """Return ``unreachable`` with the cause, which a callback delivers. To be called before any partition
        is assigned: else this call would take a record."""
        self.consumer.poll(0)
        return self.unreachable(problem)

    def _partition_fault(self, place: Partition, problem: KafkaError | str) -> IngestError:
        if isinstance(problem, str):
            return self._failed(problem)
        return stops_alone(self._source, place, problem) or self._failed(_offsets_of(place, problem.str()))

    def now(self, held: Held) -> Held:
        """Return what the cluster holds now of the partition of ``held``."""
        from confluent_kafka import KafkaException, TopicPartition

        place = TopicPartition(held.topic, held.partition)
        try:
            low, end = self.consumer.get_watermark_offsets(place, timeout=ANSWER_SECONDS)
        except KafkaException as problem:
            raise self.unreachable(problem.args[0]) from None
        return Held(held.topic, held.partition, low, end, held.topic_id)

    def consume(self, count: int, seconds: float) -> Sequence[Message]:
        """Return up to ``count`` messages, including errors and ends of partitions, within ``seconds``."""
        from confluent_kafka import KafkaException

        try:
            found: Sequence[Message] = self.consumer.consume(count, seconds)
            return found
        except KafkaException as problem:
            raise self.unreachable(problem.args[0]) from None

    def unreachable(self, problem: object) -> KafkaUnreachable:
        """Return the error for a cluster that does not answer as it should. Takes no record from the
        client."""
        code = getattr(problem, "str", None)
        problems = [str(code() if callable(code) else problem)]
        with self._lock:
            if self._problem and self._problem not in problems:
                problems.append(self._problem)
        servers = self._topics.settings["bootstrap.servers"]
        return KafkaUnreachable(
            f"The Kafka cluster of {self._source} (bootstrap.servers {servers}) cannot be read: "
            f"{self._without_secrets('; '.join(problems))[:400]}.",
            fix="Check that it is up, and kafka.settings in the definition (bootstrap.servers, "
            "security.protocol, sasl.…, ssl.…). The next sync goes on where this one stood.",
        )

    def close(self) -> None:
        """Close the client. If the cluster is gone, the library goes on closing in a daemon thread that
        nobody waits for."""
        closing = threading.Thread(target=self.consumer.close, name="closing a client of Kafka", daemon=True)
        closing.start()
        # The library waits a minute or more for the answer to the group's offsets, on which nothing depends.
        closing.join(_CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ids(self, names: list[str]) -> dict[str, str]:
        """Return the ids of the topics ``names``; a topic whose id the cluster does not give is left out."""
        from concurrent.futures import TimeoutError as NoAnswer

        from confluent_kafka import KafkaException, TopicCollection, Uuid

        nothing = str(Uuid(0, 0))
        found: dict[str, str] = {}
        asked = self._admin().describe_topics(TopicCollection(names), request_timeout=_ID_SECONDS)
        for name, answer in asked.items():
            try:
                topic_id = str(answer.result(_ID_SECONDS).topic_id)
            except (KafkaException, NoAnswer):
                continue
            if topic_id != nothing:
                found[name] = topic_id
        return found

    def _offsets(
        self, places: list[TopicPartition]
    ) -> tuple[dict[Partition, tuple[int, int]], dict[Partition, KafkaError | str]]:
        """Return the first offset that each of ``places`` holds and the offset after its last readable
        record; and, of the others, why the cluster gives none.

        It sends each broker one request for all its partitions; one request per partition would take as long
        as a whole tick of the sensor.
        """
        from concurrent.futures import TimeoutError as NoAnswer

        from confluent_kafka import IsolationLevel, KafkaException
        from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

        admin = self._admin()
        found: dict[Partition, list[int]] = {(each.topic, each.partition): [] for each in places}
        problems: dict[Partition, KafkaError | str] = {}
        for spec in (OffsetSpec.earliest(), OffsetSpec.latest()):  # type: ignore[no-untyped-call]
            asked = admin.list_offsets(
                dict.fromkeys(places, spec),
                isolation_level=IsolationLevel.READ_COMMITTED,
                request_timeout=ANSWER_SECONDS,
            )
            # All answers are waited for at once: one that does not come must not cost each partition a wait.
            until = time.monotonic() + ANSWER_SECONDS
            for each, answer in asked.items():
                place = each.topic, each.partition
                try:
                    found[place].append(answer.result(max(0.0, until - time.monotonic())).offset)
                except NoAnswer:
                    problems.setdefault(place, _offsets_of(place, "no answer in time"))
                except KafkaException as problem:
                    problems.setdefault(place, problem.args[0])
        offsets = {place: (both[0], both[1]) for place, both in found.items() if place not in problems}
        return offsets, problems

    def _admin(self) -> AdminClient:
        from confluent_kafka.admin import AdminClient

        if self._asks is None:
            settings = {name: value for name, value in self._client_settings.items() if name not in OURS}
            self._asks = AdminClient({**_DEFAULTS, **settings}, logger=_LOG)
        return self._asks

    def _note(self, error: KafkaError) -> None:
        from confluent_kafka import KafkaError

        # librdkafka calls this on the thread that waits for messages and on that of an answer. "All brokers
        # are down" says less than the cause at one broker, so it never replaces a cause.
        with self._lock:
            if not self._problem or error.code() != KafkaError._ALL_BROKERS_DOWN:
                self._problem = error.str()

    def _without_secrets(self, text: str) -> str:
        for name in self._topics.secrets:
            text = text.replace(self._client_settings[name], "…")
        return text


def _offsets_of(place: Partition, problem: str) -> str:
    return f"the offsets of {place[0]}[{place[1]}]: {problem}"


def make_consumer(source: str, topics: KafkaTopics, settings: dict[str, str], **how: Any) -> Any:
    """Return a consumer with ``settings``; ``how``: ``on_error``. Raises ``KafkaRefused`` as ``Cluster``
    does."""
    try:
        from confluent_kafka import Consumer, KafkaException
    except ImportError:
        raise KafkaRefused(
            f"{source} comes from Kafka, and the library for that is not installed.",
            fix="pip install 'omnisupport-ingest[kafka]'",
        ) from None
    given = {"group.id": f"omnisupport-{source}", **_DEFAULTS, **settings}
    if "on_error" in how:
        given["error_cb"] = how["on_error"]
    try:
        return Consumer(given, logger=_LOG)
    except (KafkaException, TypeError, ValueError) as problem:
        text = str(problem)
        for name in topics.secrets:
            text = text.replace(settings[name], "…")
        raise KafkaRefused(
            f"The Kafka client refuses the settings of {source}: {text[:300]}.",
            fix=f"Correct kafka.settings in {topics.path or 'its definition'}; they are those of librdkafka.",
        ) from None


def check_settings(source: str, topics: KafkaTopics) -> None:
    """Have the library check the settings; connects to nothing.

    Raises ``KafkaRefused`` and ``ConnectionMissing``.
    """
    settings = {
        name: value for name, value in topics.client_settings().items() if name != "bootstrap.servers"
    }
    make_consumer(source, topics, settings).close()


def stops_alone(source: str, place: Partition, error: KafkaError) -> IngestError | None:
    """Return why the partition ``place`` cannot be read; None if ``error`` is of the whole cluster."""
    from confluent_kafka import KafkaError as Codes

    code, message = error.code(), error.str()
    where = f"{place[0]}[{place[1]}] of {source}"
    if code in (Codes.UNKNOWN_TOPIC_OR_PART, Codes._UNKNOWN_TOPIC, Codes._UNKNOWN_PARTITION):
        return KafkaUnreachable(
            f"{where} is not on the cluster any more ({message}): it was deleted while it was read, or the "
            "user of this client may no longer describe it.",
            fix="If it was deleted on purpose, do nothing. Else make it again, or grant the user to describe "
            "the topic (an ACL).",
        )
    if code == Codes.TOPIC_AUTHORIZATION_FAILED:
        return KafkaRefused(
            f"{where} may not be read by the user of this client ({message}).",
            fix=f"Grant that user READ on the topic {place[0]} (an ACL), or take the topic out of "
            "kafka.topics in the definition.",
        )
    if code == Codes.MSG_SIZE_TOO_LARGE:
        return KafkaRefused(
            f"{where} has a record that is larger than this client fetches ({message}).",
            fix="Raise fetch.message.max.bytes, fetch.max.bytes and receive.message.max.bytes in "
            "kafka.settings of the definition above the size of the record.",
        )
    if code in (Codes._BAD_COMPRESSION, Codes._NOT_IMPLEMENTED, Codes._BAD_MSG, Codes.INVALID_MSG):
        return KafkaRefused(
            f"{where} has records that this client cannot decode ({message}).",
            fix="Read them with another client (kafka-console-consumer). If that works, have the producer "
            "use another compression (compression.type); else the broker's copy is damaged.",
        )
    return None
