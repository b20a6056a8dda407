"""Masks: what a contract may say of how a text of personal data is shown in part (``masking`` does it)."""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN = "***"
"""What stands for a text, or for the part of it that is hidden."""

OWN = "pattern"
"""The form of a mask that a contract writes itself."""

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
