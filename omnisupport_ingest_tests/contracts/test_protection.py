"""What policies make of values: by whole columns the same as one value at a time, in plain Python."""

from __future__ import annotations

import hashlib
import stat
import threading
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from omnisupport_ingest.contracts.masking import masked
from omnisupport_ingest.contracts.masks import HIDDEN, OWN, Mask
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pii_keys import HashKey, HashKeys
from omnisupport_ingest.contracts.pii_policies import lake_columns
from omnisupport_ingest.contracts.protection import Protection, Secrets
from omnisupport_ingest.contracts.token_map import NO_MAP, TokenMap, TokenMapUnreadable

TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from("@. +-()/09\n\tab"), max_size=20
)
SPACES = " \t\n\r\f"
"""What RE2 calls a space."""


NO_LABEL = SPACES + "@.,;:!?\"'<>(){}[]\\/|`~#$%&*+=^"


def is_address(text: str) -> bool:
    """One @, a name without space before it, and a domain of labels of which the last has no digit."""
    name, _, domain = text.partition("@")
    *labels, last = domain.split(".")
    return (
        text.count("@") == 1
        and bool(name)
        and not set(name) & set(SPACES)
        and bool(labels)
        and all(each and not set(each) & set(NO_LABEL) for each in (*labels, last))
        and 2 <= len(last) <= 24
        and not set(last) & set("0123456789_-")
    )


def email(text: str) -> str:
    name, _, domain = text.partition("@")
    return f"{name[: min(3, len(name) // 2)]}{HIDDEN}@{domain}" if is_address(text) else HIDDEN


def email_whole(text: str) -> str:
    return f"{HIDDEN}@{HIDDEN}.{text.rpartition('.')[2]}" if is_address(text) else HIDDEN


def name(text: str) -> str:
    shown, before = "", " "
    for character in text:
        if character in SPACES:
            shown += character
        elif before in SPACES:
            shown += character + HIDDEN
        before = character
    return shown if shown.strip(SPACES) else HIDDEN


def phone(text: str) -> str:
    digits = [place for place, character in enumerate(text) if character in "0123456789"]
    if len(digits) < 6:
        return HIDDEN
    return "".join(
        character if character in " +-()./" or place in digits[-2:] else "*"
        for place, character in enumerate(text)
    )


MEANT = {"email": email, "email-whole": email_whole, "name": name, "phone": phone, "text": lambda _: HIDDEN}


@pytest.mark.parametrize("form", MEANT)
@given(texts=st.lists(TEXTS | st.none(), max_size=8))
@example(texts=["ada.lovelace@example.org", "ab@x", "a@x", "@x", "nobody", "", None, "a@b@c.de", "x@y.", "@"])
@example(texts=["or a@x.org, I am Ada, born 1815", '{"mail": "a@x.org", "ssn": "123"}', "@ada", "a@x.org"])
@example(texts=["+41 79 123 45 67", "12345", "123456", "(030) 123-456 ext. Bob", "٣٤٥٦٧٨٩"])
@example(texts=["Ada Lovelace", "  Ada\u00a0K. ", "\t", "É é", "a\vb c"])
def test_a_mask_of_a_column_is_the_mask_of_each_text(form: str, texts: list[str | None]) -> None:
    found = masked(Mask(form), pa.array(texts, pa.string())).to_pylist()
    assert found == [None if text is None else MEANT[form](text) for text in texts]


@given(text=st.text("abc1.", min_size=4, max_size=30))
def test_no_mask_of_an_address_shows_more_than_half_of_its_name(text: str) -> None:
    found = masked(Mask("email"), pa.array([f"{text}@example.org"]))[0].as_py()
    shown = found.removesuffix("@example.org").removesuffix(HIDDEN)
    assert len(shown) <= len(text) / 2 and text.startswith(shown)


def test_a_mask_of_ones_own_hides_what_it_does_not_match() -> None:
    mask = Mask(OWN, r"(\d{4})-\d+", r"\1-xx")
    found = masked(mask, pa.array(["card 1234-5678 and 9999-1", "no card", None]))
    assert found.to_pylist() == ["card 1234-xx and 9999-xx", HIDDEN, None]


def people(*columns: Column) -> TableContract:
    own = (Column("id", "bigint", nullable=False), *columns)
    hour = timedelta(hours=1)
    return TableContract(
        "people", "1.0.0", "desk", "public", "people", "", "", "", ("id",), lake_columns(own), None, hour,
        hour, "", "", unprotected=own,
    )  # fmt: skip


KEY = HashKey("2026a", b"a secret of more than thirty-two characters")


@given(texts=st.lists(TEXTS | st.none(), max_size=8))
def test_a_hash_is_keyed_and_the_same_in_every_column_and_table(texts: list[str | None]) -> None:
    secrets = Secrets(HashKeys((KEY,)))
    one = Protection(people(Column("email", "text", pii="hash")), secrets).columns["email"]
    other = Protection(people(Column("sender", "text", pii="hash")), secrets).columns["sender"]
    hashed = one(pa.array(texts, pa.string())).to_pylist()
    meant = [
        None
        if text is None
        else "2026a:"
        + hashlib.blake2b(text.encode(), key=KEY.secret, person=b"value", digest_size=20).hexdigest()
        for text in texts
    ]
    assert hashed == meant == other(pa.array(texts, pa.string())).to_pylist()


def test_the_key_decides_the_hash_however_long_it_is() -> None:
    keys = [HashKey("k", secret) for secret in (b"x" * 32, b"y" * 32, b"x" * 64, b"x" * 65, b"x" * 66)]
    assert len({key.hash_of("ada") for key in keys}) == len(keys) == len({key.check() for key in keys})


def test_what_is_dropped_and_what_no_contract_names_is_in_no_row() -> None:
    contract = people(Column("email", "text", pii="drop"), Column("note", "text"))
    row = Protection(contract).row({"id": "1", "email": "a@b.c", "note": None, "other": "x"})
    assert row == {"id": "1", "note": None}


@pytest.fixture
def tokens(tmp_path: Path) -> TokenMap:
    found = TokenMap(tmp_path / "tokens.sqlite")
    found.make()
    return found


def test_the_same_value_has_the_same_token_and_it_says_nothing_of_the_value(tokens: TokenMap) -> None:
    ada, eve = tokens.tokens_of(["ada", "eve"])
    assert tokens.tokens_of(["eve", "ada", "bob"])[:2] == [eve, ada]
    assert (tokens.value_of(ada), tokens.token_of("ada"), tokens.value_of("tok_none")) == ("ada", ada, None)
    other = TokenMap(tokens.path.with_name("other.sqlite"))
    other.make()
    assert other.tokens_of(["ada"]) != [ada] and other.version() != tokens.version()


def test_only_its_owner_may_read_the_map(tokens: TokenMap) -> None:
    tokens.tokens_of(["ada"])
    modes = {stat.S_IMODE(file.stat().st_mode) for file in tokens.path.parent.iterdir()}
    assert modes == {0o600}


def test_many_workers_give_one_value_one_token(tokens: TokenMap) -> None:
    texts, found = [f"value {number}" for number in range(200)], []
    threads = [
        threading.Thread(target=lambda: found.append(dict(zip(texts, tokens.tokens_of(texts), strict=True))))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(each == found[0] for each in found)
    assert len(set(found[0].values())) == len(texts)


def test_what_is_forgotten_leaves_no_byte_in_the_map(tokens: TokenMap) -> None:
    token, _ = tokens.tokens_of(["ada@example.org", "eve"])
    assert tokens.forget(token) and not tokens.forget(token)
    assert b"ada@example.org" not in tokens.path.read_bytes()
    assert tokens.value_of(token) is None and tokens.tokens_of(["ada@example.org"]) != [token]


def test_a_map_that_is_damaged_is_an_error_with_the_fix(tmp_path: Path) -> None:
    missing = TokenMap(tmp_path / "none.sqlite")
    assert missing.version() == NO_MAP and missing.value_of("tok_1") is None
    damaged = TokenMap(tmp_path / "damaged.sqlite")
    damaged.path.write_bytes(b"no database at all" * 100)
    with pytest.raises(TokenMapUnreadable, match="backup"):
        damaged.tokens_of(["ada"])


def test_a_whole_number_has_one_hash_however_it_is_spelled() -> None:
    badge = people(Column("badge", "integer", pii="hash"))
    protect = Protection(badge, Secrets(HashKeys((KEY,)))).columns["badge"]
    found = protect(pa.array(["7", "007", "+7", "-0", "0", "seven", None])).to_pylist()
    assert found[:3] == [KEY.hash_of("7")] * 3 and found[3] == found[4] == KEY.hash_of("0")
    assert found[5:] == [KEY.hash_of("seven"), None]
