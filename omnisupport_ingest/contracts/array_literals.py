r"""PostgreSQL's array literals, ``{a,"b, \"c\"",NULL}``.

Only the canonical one-dimensional form that the server writes is read (PostgreSQL manual, 8.15.6,
"Array Input and Output Syntax"): an element is quoted if it is empty, reads NULL, or holds a brace,
comma, quote, backslash or white space; within quotes a backslash escapes quotes and backslashes.
Anything else (more dimensions, explicit bounds) is None.
"""

from __future__ import annotations

import re

from omnisupport_ingest.contracts.pg_values import whole_number

# Possessive quantifiers (++, *+): no long text is tried again at each of its characters.
_QUOTED = r'"((?:[^"\\]++|\\.)*+)"'
_BARE = r'([^,{}"\\ \t\n\v\f\r]++)'
_ELEMENT = re.compile(rf"{_QUOTED}|{_BARE}", re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_WHOLE_NUMBER = re.compile(r"-?[0-9]+\Z")
_LONGS = range(-(2**63), 2**63)


def strings_of(text: str) -> list[str | None] | None:
    """The elements of ``text``; None where it is no one-dimensional array literal."""
    if not (text.startswith("{") and text.endswith("}")):
        return None
    inside, at = text[1:-1], 0
    elements: list[str | None] = []
    while inside:
        found = _ELEMENT.match(inside, at)
        if found is None:
            return None
        quoted, bare = found.groups()
        if quoted is not None:
            elements.append(_ESCAPED.sub(r"\1", quoted))
        else:
            elements.append(None if bare.upper() == "NULL" else bare)
        at = found.end()
        if at == len(inside):
            break
        if inside[at] != ",":
            return None
        at += 1
    return elements


def longs_of(text: str) -> list[int | None] | None:
    """The same as numbers; None too where an element is no 64-bit integer."""
    strings = strings_of(text)
    if strings is None:
        return None
    longs: list[int | None] = []
    for element in strings:
        number = None if element is None or not _WHOLE_NUMBER.match(element) else whole_number(element)
        if element is not None and (number is None or number not in _LONGS):
            return None
        longs.append(number)
    return longs
