"""What seems to be personal data: by values, by types and by names; a proposal says no value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pii_scan import (
    Proposal,
    is_card,
    is_email,
    is_iban,
    is_ip,
    is_phone,
    scan,
    with_notes,
)
from omnisupport_ingest_tests.contracts.test_pii_policies import DOCUMENT

VALUES: dict[str, list[str]] = {
    "e-mail address": ["ada@example.org", "eve.b+x@mail.example.co.uk", "o'neil@x-y.de"],
    "phone number": [
        *("+41 79 123 45 67", "(030) 1234567", "0049-30-123456", "+14155550132"),
        *("(415) 555-0132", "415-555-0132", "415.555.0132", "1-415-555-0132", "020 7946 0018"),
    ],
    "card number": ["4111 1111 1111 1111", "5500-0000-0000-0004", "340000000000009"],
    "IBAN": ["DE89370400440532013000", "GB82 WEST 1234 5698 7654 32", "CH9300762011623852957"],
    "IP address": ["192.0.2.7", "2001:db8::1", "10.0.0.0/8", "192.0.2.7:443"],
}
NONE = [
    "4111 1111 1111 1112",
    "0000000000000000",
    "DE88370400440532013000",
    "256.1.1.1",
    "a@b",
    "12345678",
    "4155550132",
    "115-555-0132",
    "01.02.2024",
    "01/02/2024",
    "0012345678905",
    "GB82 WEST 1234 5698 7654 3",
    "x",
]
TESTS = {
    "e-mail address": is_email,
    "phone number": is_phone,
    "card number": is_card,
    "IBAN": is_iban,
    "IP address": is_ip,
}


@pytest.mark.parametrize("what", VALUES)
def test_a_value_is_what_it_must_be(what: str) -> None:
    for of, texts in VALUES.items():
        for text in texts:
            assert TESTS[what](text) == (of == what), text
    assert not any(TESTS[what](text) for text in NONE)


@given(digits=st.text("0123456789", min_size=12, max_size=18), wrong=st.integers(1, 9))
def test_one_digit_in_ten_completes_a_card(digits: str, wrong: int) -> None:
    right = [each for each in "0123456789" if is_card(digits + each)]
    assert len(right) == 1 or set(digits) | {right[0] if right else digits[0]} == {digits[0]}
    if right:
        assert not is_card(digits + str((int(right[0]) + wrong) % 10))


@given(st.text())
def test_any_text_may_be_looked_at(text: str) -> None:
    for test in TESTS.values():
        assert test(text) in (True, False)


def one(column: Column, *values: str, key: tuple[str, ...] = ("id",)) -> Proposal | None:
    found = scan([column], key, {column.name: values})
    return found[0] if found else None


@pytest.mark.parametrize("what", VALUES)
def test_values_tell_whatever_the_column_is_called(what: str) -> None:
    texts = [*VALUES[what], VALUES[what][0]]
    found = one(Column("x1", "text"), *texts)
    assert found is not None and found.what == what
    assert not any(text in repr(found) for text in texts)
    # Too few to tell.
    assert one(Column("x1", "text"), *VALUES[what][:2]) is None


PEOPLE = [
    *(
        "Ada Lovelace",
        "María José García",
        "Jürgen Müller",
        "O'Neil, Sarah",
        "Nguyễn Văn An",
        "J. R. Hartley",
    ),
    *("Grace Hopper", "Anne-Marie Dupont", "Katherine Johnson", "Peter van Dyck"),
]
THINGS = [
    ["New York", "San Francisco", "Los Angeles", "Charlotte", "Santa Rosa"],
    ["Blue Widget", "Red Widget", "Steel Bolt", "Copper Wire"],
    ["Open", "Closed", "Pending"],
    ["Printer is on fire", "Cannot log in", "Anna cannot log in", "Invoice is wrong"],
    ["martin", "anna", "peter"],
]


@pytest.mark.parametrize("names", [PEOPLE, ["Anna", "Peter", "Krzysztof", "Zeno"]])
def test_names_of_people_are_told_by_the_common_ones_among_them(names: list[str]) -> None:
    found = one(Column("x1", "text"), *names)
    assert found is not None and (found.what, found.policy_text) == ("name of a person", "mask (name)")
    assert not any(name in repr(found) for name in names)


@pytest.mark.parametrize("texts", THINGS, ids=lambda texts: texts[0])
def test_other_texts_of_words_are_no_names(texts: list[str]) -> None:
    assert one(Column("x1", "text"), *texts) is None


@pytest.mark.parametrize(
    ("pg_type", "texts"),
    [
        ("text", ["write to ada@example.org", "nothing", "else"]),
        ("text", ["pay to GB82 WEST 1234 5698 7654 32 please", "nothing", "else"]),
        ("text", ["the card 4111 1111 1111 1111", "5500-0000-0000-0004, expired", "else"]),
        ("jsonb", ['{"iban": "DE89370400440532013000"}', "{}", "[]"]),
    ],
)
def test_a_text_with_personal_data_in_it_is_free_text(pg_type: str, texts: list[str]) -> None:
    found = one(Column("x", pg_type), *texts)
    assert found is not None and (found.what, found.policy_text) == ("free text", "mask (text)")


def test_one_long_number_in_many_texts_is_no_card() -> None:
    assert one(Column("x", "text"), "parcel 4111 1111 1111 1111", "nothing", "else", "more") is None


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (Column("email", "text"), "mask (email)"),
        (Column("contactEmail", "text"), "mask (email)"),
        (Column("E-Mail", "text"), "mask (email)"),
        (Column("E-Mail (privat)", "text"), "mask (email)"),
        (Column("Kunde.Phone", "text"), "mask (phone)"),
        (Column("mail–neu", "text"), "mask (email)"),
        (Column("größemail", "text"), None),
        (Column("customer_phone", "bigint"), "hash"),
        (Column("full_name", "text"), "mask (name)"),
        (Column("client", "inet"), "hash"),
        (Column("born_on", "date"), "hash"),
        (Column("card_number", "text"), "drop"),
        (Column("id_number", "text"), "drop"),
        (Column("email", "jsonb[]"), "drop"),
        (Column("email2", "text"), "mask (email)"),
        (Column("phone1", "text"), "mask (phone)"),
        (Column("tel_no", "text"), "mask (phone)"),
        (Column("addresses", "inet[]"), "drop"),
        (Column("customer_name", "text"), "mask (name)"),
        (Column("vat_id", "text"), "drop"),
        (Column("ipaddress", "text"), "hash"),
        (Column("dateOfBirth", "date"), "hash"),
        (Column("sha256", "text"), None),
        (Column("address", "text[]"), "drop"),
        (Column("email_verified", "boolean"), None),
        (Column("email_sent_at", "timestamptz"), None),
        (Column("filename", "text"), None),
        (Column("comment_no", "integer"), None),
        (Column("description", "text"), None),
        (Column("amount", "numeric(10,2)"), None),
    ],
    ids=lambda value: value.name if isinstance(value, Column) else str(value),
)
def test_a_name_or_a_type_is_a_hint(column: Column, told: str | None) -> None:
    found = one(column)
    assert (found.policy_text if found else None) == told


def test_nothing_but_keep_is_proposed_for_a_key() -> None:
    found = one(Column("email", "text"), key=("email",))
    assert found is not None and found.policy_text == "keep"


def test_a_proposal_can_be_written_into_the_contract_as_it_is(tmp_path: Path) -> None:
    document: dict[str, Any] = json.loads(json.dumps(DOCUMENT))
    noted = with_notes(document)
    assert noted["x-cdc"]["pii"]["email"] == {
        "policy": "keep",
        "note": "To decide: e-mail address, by its name; mask (email) would fit.",
    }
    assert set(noted["x-cdc"]["pii"]) == {"email", "phone", "born_on"}
    assert contract_of(noted, tmp_path / "people.json").unprotected == ()
    for each in scan(contract_of(document, tmp_path / "p.json").columns, ("id",)):
        told = {"policy": each.policy, "note": "n"} | ({"mask": each.mask} if each.mask else {})
        document["x-cdc"]["pii"] = {each.column: told}
        contract_of(document, tmp_path / "people.json")


def test_a_contract_without_a_hint_has_no_notes() -> None:
    document: dict[str, Any] = json.loads(json.dumps(DOCUMENT))
    document["properties"] = {"id": document["properties"]["id"]}
    assert with_notes(document) is document
