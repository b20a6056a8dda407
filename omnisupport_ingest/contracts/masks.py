r"""Masks: what is left of a text of personal data that readers may see in part.

A mask is one substitution by regular expressions of RE2, which Arrow carries out on whole columns: a text
that matches becomes what the replacement says, any other becomes ``***``. NULL stays NULL. A mask is no
secret and needs none: the same text always has the same mask, and many texts share one.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

HIDDEN = "***"
"""What stands for a text, or for the part of it that is hidden."""

OWN = "pattern"
"""The form of a mask that a contract writes itself."""


@dataclass(frozen=True, slots=True)
class Mask:
    """How one column is masked.

    ``form``: one of ``FORMS``, or ``OWN``: then each match of ``pattern`` becomes ``replacement``, in which
    ``\\1`` is the first group; a text without a match is hidden whole.
    """

    form: str
    pattern: str = ""
    replacement: str = ""

    def of(self, texts: pa.StringArray) -> pa.StringArray:
        """Mask ``texts``; null stays null."""
        if self.form == "phone":
            return _phone(texts)
        if self.form == "text":
            return pc.if_else(texts.is_valid(), HIDDEN, texts)
        own = (self.pattern, self.replacement)
        pattern, replacement = own if self.form == OWN else _FORMS[self.form]
        matched = pc.match_substring_regex(texts, pattern)
        return pc.if_else(matched, pc.replace_substring_regex(texts, pattern, replacement), HIDDEN)


# The first characters of an address are shown, three at most and never more than half of its name.
_FORMS = {
    "email": (r"(?s)\A(?:(.{3}).{3,}|(.{2}).{2,3}|(.).{1,2}|.?)@([^@]+)\z", rf"\1\2\3{HIDDEN}@\4"),
    "email-whole": (r"(?s)\A.*@[^@]*\.([^.@]+)\z", rf"{HIDDEN}@{HIDDEN}.\1"),
    "name": (r"([^\s])[^\s]*", rf"\1{HIDDEN}"),
}

FORMS = (*sorted((*_FORMS, "phone", "text")), OWN)
"""The masks that a contract may name."""

_SHOWN_DIGITS = r"(?s)\A(?P<head>.*?)(?P<tail>[0-9][^0-9]*[0-9][^0-9]*)\z"
_ENOUGH_DIGITS = r"(?:[0-9][^0-9]*){6}"
_NO_PUNCTUATION = r"[^ +\-()./]"


def _phone(texts: pa.StringArray) -> pa.StringArray:
    """The last two digits and the punctuation are left, if there are six digits at least."""
    parts = pc.extract_regex(texts, _SHOWN_DIGITS)
    head, tail = (pc.struct_field(parts, name) for name in ("head", "tail"))
    hidden = pc.binary_join_element_wise(
        pc.replace_substring_regex(head, _NO_PUNCTUATION, "*"),
        pc.replace_substring_regex(tail, r"[^0-9 +\-()./]", "*"),
        "",
    )
    enough = pc.match_substring_regex(texts, _ENOUGH_DIGITS)
    return pc.if_else(enough, hidden, HIDDEN)
