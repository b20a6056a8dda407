r"""PostgreSQL's text of numbers and of values with parts: arrays, hstore, bits, money."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal

import numpy as np

_BARE_ELEMENT = re.compile(r'[^,{}"\\\s]+')


def float_text(value: float, *, single: bool) -> str:
    """Return the shortest text that reads as ``value``, as ``extra_float_digits = 1`` writes it.

    ``single``: it is a ``real``. PostgreSQL writes an exponent outside of 1e-4 to 1e6 (``real``) or 1e15.
    """
    number = np.float32(value) if single else np.float64(value)
    if np.isnan(number):
        return "NaN"
    if np.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    digits, _, exponent = np.format_float_scientific(number, unique=True, trim="-").partition("e")
    if -4 <= int(exponent) < (6 if single else 15):
        return np.format_float_positional(number, unique=True, trim="-")
    return f"{digits}e{int(exponent):+03d}"


def array(elements: Iterable[str | None]) -> str:
    """Return ``{a,"b c",NULL}``: elements are quoted where PostgreSQL quotes them (manual, 8.15.6)."""
    return "{" + ",".join("NULL" if each is None else _element(each) for each in elements) + "}"


def _element(text: str) -> str:
    if _BARE_ELEMENT.fullmatch(text) and text.upper() != "NULL":
        return text
    return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'


def hstore(pairs: Mapping[str, str | None]) -> str:
    """Return ``"a"=>"1", "b"=>NULL`` (manual, F.17)."""

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'

    return ", ".join(
        f"{quoted(name)}=>{'NULL' if value is None else quoted(value)}" for name, value in pairs.items()
    )


def bits(value: bytes, length: int | None) -> str:
    """Return a bit string from Debezium's bytes, the lowest byte first. ``length``: in bits, if known."""
    digits = format(int.from_bytes(value, "little"), "b")
    return digits.zfill(length) if length else digits


def money(amount: Decimal) -> str:
    """Return ``$1,234.50``, as ``lc_monetary = C`` writes it."""
    sign = "-" if amount < 0 else ""
    return f"{sign}${amount.copy_abs():,.2f}"
