"""Finding columns that seem to hold personal data, by their names, types and values.

A proposal is a hint on which a person decides; it changes nothing. A name alone is a weak hint. Values are
tested for their check digits by python-stdnum (Luhn's sum of a card, ISO 7064 of an IBAN); no message quotes
a value.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stdnum import ean, iban, luhn

from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pg_types import INTEGERS, Kind
from omnisupport_ingest.contracts.pii_policies import DROP, HASH, KEEP, MASK

TO_DECIDE = "To decide: "
"""Begins the note of a policy that nobody has decided on yet."""

ENOUGH = 0.6
"""The share of distinct values that must be of a sort for the column to be of it."""

FEWEST = 3
"""Fewer distinct values prove nothing."""

_CARDS_WITHIN = 0.3
"""The share of distinct texts that must hold the number of a card: one in ten long numbers has Luhn's sum."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """``column`` seems to hold ``what``, such as an e-mail address; ``why``, and the ``policy`` that fits.

    ``mask``: for the policy ``mask``, else None.
    """

    column: str
    what: str
    policy: str
    mask: str | None
    why: str

    @property
    def policy_text(self) -> str:
        """The policy for messages, as ``mask (email)``."""
        return self.policy if self.mask is None else f"{self.policy} ({self.mask})"


@dataclass(frozen=True, slots=True)
class _Sort:
    """A sort of personal data. ``names``: parts of column names that suggest it, separated by spaces;
    ``is_one``: whether a value is of it, None where a single value does not tell."""

    what: str
    policy: str
    mask: str | None
    names: str
    is_one: Callable[[str], bool] | None = None


_EMAIL = re.compile(r"[^@\s]{1,64}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,24}\Z")
_EMAIL_WITHIN = re.compile(r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]+\.[A-Za-z]{2,24}")
_PHONE = re.compile(
    r"(?:\+|00|\(?0)[0-9 ()./-]{6,24}\Z"
    r"|(?:1[-. ])?(?:\([2-9][0-9]{2}\) ?|[2-9][0-9]{2}[-. ])[2-9][0-9]{2}[-. ][0-9]{4}\Z"
)
_DATE = re.compile(r"[0-9]{1,4}([./-])[0-9]{1,2}\1[0-9]{1,4}\Z")
_CARD_WITHIN = re.compile(r"(?<![0-9])[0-9](?:[ -]?[0-9]){12,18}(?![0-9])")
_IBAN_WITHIN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{2,4}){3,8}(?![A-Za-z0-9])")


def is_email(text: str) -> bool:
    return _EMAIL.match(text) is not None


def is_phone(text: str) -> bool:
    """Whether ``text`` is written as a phone number is: it begins with +, 0 or 00, and has 7 to 15 digits, or
    it is ``(415) 555-0132`` or the like. Dates and numbers of articles (EAN) are none."""
    text = text.strip()
    # The pattern first: it fits at most 29 characters, and other texts may be very long.
    if _PHONE.match(text) is None or _DATE.match(text) is not None or ean.is_valid(text):
        return False
    return 7 <= sum(character.isdigit() for character in text) <= 15 and not is_ip(text)


def is_card(text: str) -> bool:
    """Whether ``text`` is 13 to 19 digits with Luhn's sum (ISO/IEC 7812-1), spaces and hyphens aside."""
    digits = text.replace(" ", "").replace("-", "")
    if not (digits.isascii() and digits.isdigit() and 13 <= len(digits) <= 19) or len(set(digits)) == 1:
        return False
    return bool(luhn.is_valid(digits))


def is_iban(text: str) -> bool:
    """Whether ``text`` is an IBAN of a country with the right length and check digits (ISO 13616; ISO/IEC
    7064, MOD 97-10)."""
    # The longest has 34 characters, and other texts may be very long.
    return len(text) <= 60 and bool(iban.is_valid(text, check_country=False))


def is_ip(text: str) -> bool:
    """Whether ``text`` is an address of IPv4 or IPv6, also of a network; of IPv4 also with a port."""
    address, _, port = text.partition(":")
    if port.isdigit() and "." in address:
        text = address
    try:
        ipaddress.ip_interface(text)
    except ValueError:
        return False
    return "." in text or ":" in text


_WORD = r"[^\W\d_]++(?:['’-][^\W\d_]++)*+\.?"
_WORDS = re.compile(rf"{_WORD}(?:,? {_WORD}){{0,4}}\Z")
"""One to five words of letters."""

_COMMON = """
ada adam agnieszka ahmed aisha alejandro alessandro alexander alexandra ali alice amanda amelia amy
ana andrea andreas andrew angela anita anja ann anna anne anthony antonio ashley astrid barbara
beatriz benjamin bernd betty birgit brian bruno camille carlos carmen carol caroline catherine
charles charlotte chiara chloe chris christian christina christopher claire clara claudia claudio
cynthia daniel daniela david deborah denise dennis diana diego dieter dmitri donald donna dorothy
edward eleanor elena elisabeth elizabeth ella emily emma eric erik ethan eva evelyn fatima felix
fernando florian frances francesca francesco francisco frank franz frederic friedrich gabriel
gabriela gary george giovanni giulia giuseppe gloria grace greta hanna hannah hans harold harry
heather heike heinz helen helena henry hiroshi ibrahim ingrid irina isabel isabella isabelle ivan
jack jacob jacqueline jakub james jan jane janet jason javier jean jeffrey jennifer jens jessica
joan joana joao johan johanna john jonas jonathan jorge jose josef joseph joshua juan judith julia
julian julie juliette jurgen karen karin karl katarzyna katharina kathleen katja kevin kim
klaus krzysztof lars laura lauren lea lena leon linda lisa louis louise luca lucas lucia luis luisa
lukas magdalena manuel marco marcus margaret maria marie mario marion mark markus marta martha
martin martina mary mateusz matteo matthew matthias maximilian megan mei melissa mia michael michal
michel michelle miguel mohamed mohammad mohammed monika muhammad nadia nancy natalia natalie
nathalie nicholas nicola nicole nina noah nora olga oliver olivia omar oscar pablo pamela paolo
patricia patrick paul paula paulo pavel pedro peter petra philip philippe pierre piotr priya rachel
rafael rahul ralf raymond rebecca renate ricardo richard rita robert roberto roger ronald rosa ruth
ryan sabine samantha samuel sandra sara sarah scott sebastian sergei sharon silvia simon sofia sonja
sophia sophie stefan stefanie stephanie stephen steven susan susanne sven svetlana takashi teresa
thomas tim timothy tobias tomasz ursula uwe valentina vera victor victoria vincent virginia vladimir
walter wei werner william wolfgang yuki yusuf zoe
"""

_GIVEN_NAMES = frozenset(_COMMON.split())
"""Given names that are common in Europe, America and some other countries; others are not known."""


def are_names(texts: Collection[str]) -> bool:
    """Whether the different ``texts`` seem to be names of people: words that begin with capitals, with common
    given names among them.

    Among full names one in ten has to have a known given name, of single words half of them.
    """
    named = [text for text in texts if len(text) <= 80 and _WORDS.match(text) and text[0].isupper()]
    if not texts or len(named) < ENOUGH * len(texts):
        return False
    known = sum(_given_name(text) in _GIVEN_NAMES for text in named)
    full = sum(" " in text and text.rpartition(" ")[2][0].isupper() for text in named)
    return known >= max(2, (0.1 if full >= ENOUGH * len(texts) else 0.5) * len(texts))


def _given_name(text: str) -> str:
    """Return the first word, or the first one behind a comma, in small letters without accents."""
    word = (text.partition(", ")[2] or text).split()[0].lower()
    return "".join(each for each in unicodedata.normalize("NFKD", word) if not unicodedata.combining(each))


_SORTS = (
    _Sort("e-mail address", MASK, "email", "email e_mail mail", is_email),
    _Sort("IBAN", DROP, None, "iban bank_account", is_iban),
    _Sort("card number", DROP, None, "card_number cardnumber credit_card cc_number pan", is_card),
    _Sort("IP address", HASH, None, "ip ip_address ipaddr ipaddress remote_addr client_ip", is_ip),
    _Sort("phone number", MASK, "phone", "phone telephone tel mobile cell fax msisdn", is_phone),
    _Sort("secret", DROP, None, "password passwd password_hash secret api_key access_token"),
    _Sort(
        "number of an identity",
        DROP,
        None,
        "ssn social_security passport national_id tax_id vat_id vat_number id_number nino ahv steuer_id",
    ),
    _Sort(
        "name of a person",
        MASK,
        "name",
        "full_name fullname first_name firstname last_name lastname surname given_name family_name "
        "maiden_name display_name contact_name customer_name person_name patient_name "
        "employee_name agent_name requester author vorname nachname",
    ),
    _Sort("account name", HASH, None, "username user_name login nickname handle"),
    _Sort(
        "date of birth",
        HASH,
        None,
        "birth birthday birthdate date_of_birth dateofbirth dob born_on born geburtsdatum",
    ),
    _Sort("postal address", MASK, "text", "address street postcode zip zip_code postal_code"),
    _Sort("free text", MASK, "text", "body comment message note notes bio"),
)
_FREE_TEXT = _SORTS[-1]
_IP_TYPES = frozenset({"inet", "cidr", "inet[]", "cidr[]"})


def scan(
    columns: Sequence[Column], key: Sequence[str], values: Mapping[str, Sequence[str]] | None = None
) -> list[Proposal]:
    """Return proposals for ``columns`` (as the source has them), in their order.

    ``values``: texts of some rows, by column; without them, only names and types count. Values outweigh
    names. For a column of the ``key`` only ``keep`` can be proposed.
    """
    found = []
    for column in columns:
        proposal = (
            _by_values(column, (values or {}).get(column.name, ())) or _by_type(column) or _by_name(column)
        )
        if proposal is not None:
            found.append(_fitting(proposal, column, key))
    return found


def with_notes(document: dict[str, Any]) -> dict[str, Any]:
    """Return the contract ``document`` with proposals as notes in ``x-cdc.pii``, under ``keep`` until a
    person decides.
    """
    columns = [
        Column(name, body["x-pg-type"], nullable=name not in document["required"])
        for name, body in document["properties"].items()
    ]
    proposals = scan(columns, document["x-cdc"]["key"])
    if not proposals:
        return document
    notes = {
        each.column: {
            "policy": KEEP,
            "note": f"{TO_DECIDE}{each.what}, {each.why}; {each.policy_text} would fit.",
        }
        for each in proposals
    }
    return document | {"x-cdc": document["x-cdc"] | {"pii": notes}}


def _by_values(column: Column, texts: Sequence[str]) -> Proposal | None:
    distinct = set(texts)
    if len(distinct) < FEWEST or column.type.kind not in INTEGERS | {Kind.TEXT, Kind.NUMERIC_TEXT}:
        return None
    for sort in _SORTS:
        if sort.is_one is None:
            continue
        are = sum(sort.is_one(text) for text in distinct)
        if are >= ENOUGH * len(distinct):
            return _proposal(column, sort, f"by {are} of {len(distinct)} different values")
    if column.type.kind is Kind.TEXT and are_names(distinct):
        sort = next(each for each in _SORTS if each.mask == "name")
        return _proposal(column, sort, f"by the common given names in {len(distinct)} different values")
    return _by_what_is_within(column, distinct) if column.type.kind is Kind.TEXT else None


def _by_what_is_within(column: Column, texts: Collection[str]) -> Proposal | None:
    """Return a proposal for a column whose ``texts``, prose or JSON, have personal data in them."""
    for what, pattern, is_one, least in (
        ("e-mail addresses", _EMAIL_WITHIN, None, 0.0),
        ("IBANs", _IBAN_WITHIN, is_iban, 0.0),
        ("card numbers", _CARD_WITHIN, is_card, _CARDS_WITHIN),
    ):
        within = sum(
            any(is_one is None or is_one(found[0]) for found in pattern.finditer(text)) for text in texts
        )
        if within and within >= least * len(texts):
            why = f"with {what} in {within} of {len(texts)} different values"
            return _proposal(column, _FREE_TEXT, why)
    return None


def _by_type(column: Column) -> Proposal | None:
    if column.pg_type in _IP_TYPES:
        sort = next(each for each in _SORTS if each.is_one is is_ip)
        return _proposal(column, sort, f"by its type {column.pg_type}")
    return None


def _by_name(column: Column) -> Proposal | None:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column.name).lower()
    # Whatever is neither a letter nor a digit stands between words; a number behind one counts its columns.
    name = re.sub(r"(?<=[a-z])[0-9]+(?=_|\Z)", "", re.sub(r"[\W_]+", "_", words))
    if column.type.kind in (Kind.BOOLEAN, Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
        # Whether or when something about an address happened, not the address.
        return None
    for sort in _SORTS:
        if sort.mask in ("text", "name") and column.type.kind not in (Kind.TEXT, Kind.TEXT_ARRAY):
            # The number of a comment, say, is no free text.
            continue
        if any(f"_{part}_" in f"_{name}_" for part in sort.names.split()):
            return _proposal(column, sort, "by its name")
    return None


def _proposal(column: Column, sort: _Sort, why: str) -> Proposal:
    return Proposal(column.name, sort.what, sort.policy, sort.mask, why)


def _fitting(proposal: Proposal, column: Column, key: Sequence[str]) -> Proposal:
    """Return the proposal with a policy that can be applied to the column."""
    policy, mask = proposal.policy, proposal.mask
    kind = column.type.kind
    if column.name in key:
        policy, mask = KEEP, None
    elif policy == MASK and kind is not Kind.TEXT:
        policy, mask = (HASH, None) if kind in INTEGERS else (DROP, None)
    elif policy == HASH and kind not in INTEGERS | {Kind.TEXT, Kind.DATE}:
        policy = DROP
    return Proposal(proposal.column, proposal.what, policy, mask, proposal.why)


def sampled(images: Sequence[Mapping[str, str | None]]) -> dict[str, list[str]]:
    """Return the values of row images by column, without NULLs."""
    found: dict[str, list[str]] = {}
    for image in images:
        for name, value in image.items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return found
