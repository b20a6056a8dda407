"""Quotes names and texts as SQL, because replication commands take no parameters.

Quoted SQL means the same on every connection that ``connection`` opens: that module pins the settings on
which quoting depends. A text that PostgreSQL cannot store is refused.
"""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError


class NotQuotable(IngestError):
    """A name or a value cannot be written as SQL: it is empty, or has a character that PostgreSQL cannot
    hold.

    Fix: Correct it where it was given: an option, a setting, a contract or a note in the home.
    """


def identifier(name: str) -> str:
    """Return ``name`` as a quoted SQL identifier. Raises ``NotQuotable`` if it cannot be a name."""
    if not name:
        raise NotQuotable("An empty name cannot be that of anything in PostgreSQL.", fix="Give it a name.")
    _check(name, "name")
    return '"' + name.replace('"', '""') + '"'


def qualified(schema: str, table: str) -> str:
    """Return a table's name with its schema, both quoted."""
    return f"{identifier(schema)}.{identifier(table)}"


def literal(text: str) -> str:
    """Return ``text`` as an SQL string, for a session with ``standard_conforming_strings = on``.

    Raises ``NotQuotable`` if PostgreSQL cannot store the text.
    """
    _check(text, "text")
    return "'" + text.replace("'", "''") + "'"


def _check(text: str, kind: str) -> None:
    # The error must not quote the text: it may be a value of a row.
    if "\0" in text:
        problem = "the character 0, which PostgreSQL cannot hold"
    elif any("\ud800" <= character <= "\udfff" for character in text):
        problem = "half of a surrogate pair, which is no character of UTF-8"
    else:
        return
    raise NotQuotable(
        f"A {kind} of {len(text)} characters holds {problem}, so it cannot be sent to the source.",
        fix=f"Correct the {kind} where it was given: an option, a setting, a contract or a note in the home.",
    )
