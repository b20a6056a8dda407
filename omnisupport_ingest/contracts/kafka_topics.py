"""A source of the kind ``kafka``: its topics, and the settings of the client that reads them.

Settings are those of librdkafka, passed on unchanged. Settings that could lose records, and settings that
would put a secret into the file, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from omnisupport_ingest.contracts.columns import refused
from omnisupport_ingest.contracts.named_secrets import secret_in

DEFAULT_BATCH_ROWS = 50_000

OURS = {
    # Landing records the offsets; they are committed to the group afterwards.
    "enable.auto.commit": "false",
    "enable.auto.offset.store": "false",
    # A missing offset is a gap, which must not be skipped silently.
    "auto.offset.reset": "error",
    "isolation.level": "read_committed",
    "enable.partition.eof": "true",
}
"""Settings that a definition cannot change."""

_SECRET = re.compile(r"password|secret|passphrase|key\.pem$|^sasl\.oauthbearer\.config$")


@dataclass(frozen=True, slots=True)
class KafkaTopics:
    """Topics, by name or, with ``^`` in front, by regular expression; and how their cluster is reached.

    ``settings``: librdkafka's, as texts. ``secrets``: setting → (``env`` or ``file``, its name).
    ``batch_rows``: records after which a batch lands. ``path``: the definition.
    """

    topics: tuple[str, ...]
    settings: Mapping[str, str]
    secrets: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    batch_rows: int = DEFAULT_BATCH_ROWS
    path: str = ""

    @classmethod
    def of(cls, document: dict[str, Any], path: Path) -> Self:
        """Return the member ``kafka`` of the definition ``path``. Raises ``ContractError`` for a refused
        setting."""
        settings = document["settings"]
        for name in (*settings, *document.get("secrets", {})):
            if name in OURS:
                raise refused(
                    path,
                    f"kafka.settings.{name}",
                    f"is always {OURS[name]} here: with another value records could be lost or counted twice",
                    "Take it out.",
                )
        for name in settings:
            if _SECRET.search(name):
                raise refused(
                    path,
                    f"kafka.settings.{name}",
                    "is a secret, which does not stand in a definition",
                    'Name where it is: "secrets": {"' + name + '": {"env": "VARIABLE"}}, or a file.',
                )
        for topic in document["topics"]:
            try:
                re.compile(topic if topic.startswith("^") else "")
            except re.error as problem:
                raise refused(
                    path, "kafka.topics", f"{topic!r} is no regular expression: {problem}", "Correct it."
                ) from None
        return cls(
            tuple(document["topics"]),
            settings,
            {name: next(iter(held.items())) for name, held in document.get("secrets", {}).items()},
            document.get("batch_rows", DEFAULT_BATCH_ROWS),
            str(path),
        )

    def chooses(self, topic: str) -> bool:
        """Whether ``topic`` is one of the topics."""
        return any(
            re.match(each, topic) is not None if each.startswith("^") else each == topic
            for each in self.topics
        )

    def client_settings(self) -> dict[str, str]:
        """Return all settings of the client with their secrets. Raises ``ConnectionMissing`` if one is
        missing."""
        secrets = {
            name: secret_in(how, where, self.path, f"setting {name}")
            for name, (how, where) in self.secrets.items()
        }
        return {**self.settings, **secrets, **OURS}
