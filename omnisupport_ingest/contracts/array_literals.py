r"""PostgreSQL's array literals, ``{a,"b, \"c\"",NULL}``, read by Spark's own functions.

Only the canonical one-dimensional form that the server writes is read (PostgreSQL manual, 8.15.6,
"Array Input and Output Syntax"): an element is quoted if it is empty, reads NULL, or holds a brace,
comma, quote, backslash or white space; within quotes a backslash escapes quotes and backslashes.
Anything else (more dimensions, explicit bounds) gives NULL.
"""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

# Possessive quantifiers (++, *+): Java matches them in a loop, where a plain repeated group would
# recurse once per character and overflow the stack on a long element.
_QUOTED = r'"(?:[^"\\]++|\\.)*+"'
_BARE = r'[^,{}"\\\s]++'
_ELEMENT = rf"(?s)({_QUOTED}|{_BARE})"
_ONE_DIMENSION = rf"(?s)^\{{(?:(?:{_QUOTED}|{_BARE})(?:,(?:{_QUOTED}|{_BARE}))*+)?\}}\z"
_WHOLE_NUMBER = r"^-?\d+\z"


def array_of_strings(text: Column) -> Column:
    """``text`` as ``array<string>``; NULL where it is no one-dimensional array literal."""
    return F.when(text.rlike(_ONE_DIMENSION), F.transform(_elements(text), _string))


def array_of_longs(text: Column) -> Column:
    """``text`` as ``array<bigint>``; NULL too where an element is no 64-bit integer."""
    strings = array_of_strings(text)
    longs = F.transform(
        strings, lambda element: F.when(element.rlike(_WHOLE_NUMBER), element.try_cast("bigint"))
    )
    # An element that became NULL, and was not, did not fit.
    lost = F.exists(
        F.arrays_zip(strings.alias("s"), longs.alias("l")), lambda pair: pair.s.isNotNull() & pair.l.isNull()
    )
    return F.when(~lost, longs)


def _elements(text: Column) -> Column:
    return F.regexp_extract_all(text, F.lit(_ELEMENT), F.lit(1))


def _string(element: Column) -> Column:
    inside = F.substr(element, F.lit(2), F.length(element) - 2)
    return (
        F.when(element.startswith('"'), F.regexp_replace(inside, r"(?s)\\(.)", "$1"))
        .when(F.upper(element) == "NULL", F.lit(None))
        .otherwise(element)
    )
