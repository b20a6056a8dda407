"""The decoder on messages that a healthy server never sends, and COPY's escapes."""

from __future__ import annotations

import pytest

from omnisupport_ingest.sources.postgres.copy_rows import parse_row
from omnisupport_ingest.sources.postgres.errors import ProtocolViolation
from omnisupport_ingest.sources.postgres.pgoutput import Decoder


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (b"", "type b''"),
        (b"S\x00\x00\x00\x01", "type b'S'"),
        (b"I\x00\x00\x40\x00N\x00\x00", "relation 16384"),
        (b"I\x00\x00\x40\x00N\x00\x01b\x00\x00\x00\x01x", "kind 'b'"),
    ],
)
def test_message_outside_the_protocol_is_refused(message: bytes, named: str) -> None:
    with pytest.raises(ProtocolViolation, match=named):
        Decoder().decode(message)


def test_copy_text_tells_null_from_empty_and_undoes_escapes() -> None:
    assert parse_row("a\t\t\\N\t\\\\N\tx\\ty\\nz") == ["a", "", None, "\\N", "x\ty\nz"]
