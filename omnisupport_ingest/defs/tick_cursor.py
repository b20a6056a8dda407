"""What a sensor remembers from one tick to the next, as the text that Dagster keeps for it."""

from __future__ import annotations

from typing import Self

import dagster as dg

from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.records import decode_note, encode_line


class TickCursor:
    """A frozen dataclass derives from it; each of its members has a default."""

    __slots__ = ()

    def to_text(self) -> str:
        return encode_line(self)

    @classmethod
    def from_text(cls, text: str | None) -> Self:
        """Read what ``to_text`` wrote; any other text counts as the cursor of a sensor that never ran."""
        try:
            return decode_note(cls, text or "{}")
        except Unreadable:
            return cls()

    def skipping(self, why: str) -> dg.SensorResult:
        """The result of a tick that asks for nothing and leaves this cursor."""
        return dg.SensorResult(skip_reason=dg.SkipReason(why), cursor=self.to_text())
