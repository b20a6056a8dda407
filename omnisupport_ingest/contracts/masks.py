"""Masks that a contract may choose for personal texts; ``masking`` applies them. Needs no Arrow."""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN = "***"
"""Replaces a text, or its hidden part."""

OWN = "pattern"
"""The form of a mask with a pattern of the contract."""

FORMS = ("email", "email-whole", "name", "phone", "text", OWN)
"""The masks that a contract may name."""


@dataclass(frozen=True, slots=True)
class Mask:
    """How one column is masked.

    ``form``: one of ``FORMS``. ``OWN``: each match of ``pattern`` becomes ``replacement``, in which ``\\1``
    is the first group; a text without a match is hidden whole.
    """

    form: str
    pattern: str = ""
    replacement: str = ""
