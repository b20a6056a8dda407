r"""Masking whole columns of texts.

A mask is one substitution by a regular expression of RE2, carried out by Arrow: a matching text becomes the
replacement, any other text ``***``. NULL stays NULL. A mask needs no secret: one text always has one mask,
and many texts share it.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.masks import HIDDEN, OWN, Mask

_SIGN = r"[^\s@]"
_NO_LABEL = r"\s@.,;:!?\"'<>(){}\[\]\\/|`~#$%&*+=^"
_LABELS, _LAST = rf"(?:[^{_NO_LABEL}]+\.)+", rf"[^{_NO_LABEL}0-9_-]{{2,24}}"
"""A domain whose last label has no digit, so that a sentence or a JSON text with an @ is no address."""

# The first characters of an address are shown, three at most and never more than half of its name.
_FORMS = {
    "email": (
        rf"\A(?:({_SIGN}{{3}}){_SIGN}{{3,}}|({_SIGN}{{2}}){_SIGN}{{2,3}}|({_SIGN}){_SIGN}{{1,2}}|{_SIGN})"
        rf"@({_LABELS}{_LAST})\z",
        rf"\1\2\3{HIDDEN}@\4",
    ),
    "email-whole": (rf"\A{_SIGN}+@{_LABELS}({_LAST})\z", rf"{HIDDEN}@{HIDDEN}.\1"),
    "name": (r"([^\s])[^\s]*", rf"\1{HIDDEN}"),
}

_SHOWN_DIGITS = r"(?s)\A(?P<head>.*?)(?P<tail>[0-9][^0-9]*[0-9][^0-9]*)\z"
_ENOUGH_DIGITS = r"(?:[0-9][^0-9]*){6}"
_NO_PUNCTUATION = r"[^ +\-()./]"


def masked(mask: Mask, texts: pa.StringArray) -> pa.StringArray:
    """Mask ``texts``; null stays null. Raises ``ArrowInvalid`` if a pattern of the contract is not valid
    RE2."""
    if mask.form == "phone":
        return _phone(texts)
    if mask.form == "text":
        return pc.if_else(texts.is_valid(), HIDDEN, texts)
    own = (mask.pattern, mask.replacement)
    pattern, replacement = own if mask.form == OWN else _FORMS[mask.form]
    matched = pc.match_substring_regex(texts, pattern)
    return pc.if_else(matched, pc.replace_substring_regex(texts, pattern, replacement), HIDDEN)


def _phone(texts: pa.StringArray) -> pa.StringArray:
    """Keep the last two digits and the punctuation, if there are at least six digits."""
    parts = pc.extract_regex(texts, _SHOWN_DIGITS)
    head, tail = (pc.struct_field(parts, name) for name in ("head", "tail"))
    hidden = pc.binary_join_element_wise(
        pc.replace_substring_regex(head, _NO_PUNCTUATION, "*"),
        pc.replace_substring_regex(tail, r"[^0-9 +\-()./]", "*"),
        "",
    )
    enough = pc.match_substring_regex(texts, _ENOUGH_DIGITS)
    return pc.if_else(enough, hidden, HIDDEN)
