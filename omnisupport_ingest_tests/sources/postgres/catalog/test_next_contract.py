"""The next version of a contract: what each change makes of it, how it is judged, and what stays."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.learned import LearnedColumns, with_learned
from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.landing.schema_changes import (
    Difference,
    Look,
    SchemaChange,
    SchemaChanges,
    SeenColumn,
    SeenTable,
)
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.schema_changes import judged
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveColumn, LiveIndex, LiveTable
from omnisupport_ingest.sources.postgres.catalog.new_contract import draft
from omnisupport_ingest.sources.postgres.catalog.next_contract import NextContract, next_contract
from omnisupport_ingest.sources.postgres.catalog.recording import (
    LiveSchema,
    learn,
    shown_under_another_name,
    why_not_by_itself,
)


def live(name: str, pg_type: str = "text", *, not_null: bool = False, **other: Any) -> LiveColumn:
    facts = {"generated": False, "labels": (), "max_length": None, "comment": None} | other
    return LiveColumn(name, pg_type, not_null, **facts)


ID, TITLE, SIZE = live("id", "bigint", not_null=True), live("title", not_null=True), live("size", "integer")
SIZE_KEPT = replace(SIZE, not_null=True)
PLAN = live("plan", "public.plan", labels=("free", "pro"))
COLUMNS = (ID, TITLE, SIZE, PLAN)
DEFAULTS = {"n": ("7", "7"), "at": ("now()", None)}
UNPROVEN = {"at", "was_by_row"}


def form(*columns: LiveColumn, key: tuple[str, ...] = ("id",)) -> LiveSchema:
    index = LiveIndex("tickets_pkey", key, primary=True, identity=False, deferrable=False)
    table = LiveTable("public", "tickets", "r", "p", "d", None, None, None, columns, (index,))
    seen = tuple(
        SeenColumn(
            n,
            each.name,
            each.pg_type,
            each.not_null,
            *DEFAULTS.get(each.name, (None, None)),
            each.labels,
            before_known=each.name not in UNPROVEN,
        )
        for n, each in enumerate(columns, 1)
    )
    return LiveSchema(table, SeenTable(7, "public.tickets", seen, key, None))


DOCUMENT = draft(form(*COLUMNS).live, source="desk", name="tickets", owner="team:desk").document


def change(
    kind: str, column: str | None = None, before: str | None = None, after: str | None = None
) -> SchemaChange:
    at = datetime(2026, 11, 24, tzinfo=UTC)
    return SchemaChange(1, "tickets", kind, column, before, after, at, 1, Lsn(1), Lsn(2), None, None)


def proposed(*columns: LiveColumn, changes: tuple[SchemaChange, ...] = (), **other: Any) -> NextContract:
    found = next_contract(DOCUMENT, form(*columns, **other), changes)
    contract_of(found.document, Path("tickets.json"))
    return found


def with_column(name: str, /, **facts: Any) -> tuple[LiveColumn, ...]:
    return tuple(replace(each, **facts) if each.name == name else each for each in COLUMNS)


CASES = {
    "column added": ((*COLUMNS, live("note")), change("column_added", "note"), "additive", "1.1.0"),
    "column renamed": (
        with_column("title", name="subject"),
        change("column_renamed", "title", "title", "subject"),
        "breaking",
        "2.0.0",
    ),
    "column dropped": ((ID, TITLE, PLAN), change("column_dropped", "size"), "breaking", "2.0.0"),
    "widened": (
        with_column("size", pg_type="bigint"),
        change("column_widened", "size", "integer", "bigint"),
        "widening",
        "1.1.0",
    ),
    "retyped": (
        with_column("size", pg_type="text"),
        change("column_retyped", "size", "integer", "text"),
        "breaking",
        "2.0.0",
    ),
    "may be NULL": (
        with_column("title", not_null=False),
        change("column_nullable", "title"),
        "widening",
        "1.1.0",
    ),
    "enum value": (
        with_column("plan", labels=("free", "pro", "team")),
        change("enum_value_added", "plan", None, "team"),
        "widening",
        "1.1.0",
    ),
}


@pytest.mark.parametrize(("columns", "made", "compatibility", "version"), CASES.values(), ids=CASES.keys())
def test_each_change_is_followed_and_judged(
    columns: tuple[LiveColumn, ...], made: SchemaChange, compatibility: str, version: str
) -> None:
    found = proposed(*columns, changes=(made,))
    assert (found.compatibility, found.document["x-cdc"]["version"]) == (compatibility, version)
    assert next_contract(found.document, form(*columns), (made,)).steps == (), "it follows in one go"
    before, now = (contract_of(each, Path("tickets.json")) for each in (DOCUMENT, found.document))
    table = form(*columns).seen
    asks = judged(made, before, table, read_again=False)
    assert asks.asks and asks.compatibility == compatibility and asks.edit
    # The rows of a renamed column have landed under its former name.
    renamed = made.kind == "column_renamed"
    assert not judged(made, now, table, read_again=renamed).asks, "the new version answers it"


@pytest.mark.parametrize(
    ("columns", "made"),
    [
        (with_column("size", pg_type="smallint"), change("column_narrowed", "size", "integer", "smallint")),
        (with_column("size", not_null=True), change("column_not_null", "size")),
        ((*COLUMNS, live("old_one")), change("column_dropped", "elsewhere")),
    ],
)
def test_what_the_contract_holds_already_is_no_edit(
    columns: tuple[LiveColumn, ...], made: SchemaChange
) -> None:
    found = proposed(*columns, changes=(made,))
    assert found.steps == () and found.document == DOCUMENT
    now = contract_of(DOCUMENT, Path("t.json"))
    assert not judged(made, now, form(*columns).seen, read_again=False).asks


def test_an_older_column_that_the_contract_leaves_out_is_taken_in_only_when_asked_for() -> None:
    assert proposed(*COLUMNS, live("old_one")).steps == ()
    found = next_contract(DOCUMENT, form(*COLUMNS, live("old_one")), (), every=True)
    assert "old_one" in found.document["properties"]


def blocked(again: str | None, *columns: LiveColumn, changes: tuple[SchemaChange, ...] = ()) -> NextContract:
    document = DOCUMENT | {"x-cdc": DOCUMENT["x-cdc"] | {"evolution": "block", "optional_columns": ["was"]}}
    found = next_contract(document, form(*columns), changes, again=again)
    contract_of(found.document, Path("tickets.json"))
    return found


def test_where_rows_wait_for_their_contract_those_that_have_landed_may_differ_from_it() -> None:
    changes = (
        change("column_added", "new"),
        change("column_added", "untyped"),
        change("column_dropped", "size"),
    )
    found = blocked(
        None, ID, TITLE, PLAN, live("new"), live("untyped", ""), live("left_out"), changes=changes
    )
    assert found.document["x-cdc"]["optional_columns"] == ["was", "left_out", "new", "size"]
    assert "new" in found.document["properties"] and "size" not in found.document["properties"]
    # Rows go on waiting for a column that only a person can write into the contract.
    assert found.for_a_person == (
        "untyped is new, and nothing tells its type: write it into the contract yourself.",
        "With untyped, write it into x-cdc.optional_columns too: rows from before are without it.",
    )
    again = next_contract(found.document, form(ID, TITLE, PLAN, live("new")), changes, again=None)
    assert not again.steps


def test_a_table_that_is_left_out_whole_has_no_optional_columns() -> None:
    found = blocked("source snapshot", *COLUMNS, live("new"), changes=(change("column_added", "new"),))
    assert found.document["x-cdc"]["optional_columns"] == ["was"]


def test_a_new_column_says_what_older_rows_have_in_it_if_that_is_known() -> None:
    at, due = live("at", "timestamp with time zone"), live("due", "date", not_null=True)
    added = (live("extra"), live("n", "integer"), at, live("email"), due, live("was_by_row"))
    found = proposed(*COLUMNS, *added, changes=tuple(change("column_added", each.name) for each in added))
    lines = found.document["properties"]
    assert (lines["extra"]["default"], lines["n"]["default"]) == (None, "7")
    assert "default" not in lines["at"], "each row has its own"
    assert "default" not in lines["was_by_row"], "it has no default now, which proves nothing"
    assert "default" not in lines["due"], "no row was there, else it could not be NOT NULL"
    assert found.document["x-cdc"]["pii"].keys() == {"email"}, "a person has to decide"
    assert found.document["x-cdc"]["pii"]["email"]["policy"] == "drop", "and until then nobody reads it"
    assert any("e-mail" in each for each in found.for_a_person)


def test_a_renamed_column_says_nothing_of_older_rows_as_they_carry_its_former_name() -> None:
    document = deepcopy(DOCUMENT)
    document["properties"]["size"]["default"] = None
    renamed = with_column("size", name="magnitude")
    made = (change("column_renamed", "size", "size", "magnitude"),)
    found = next_contract(document, form(*renamed), made).document["properties"]
    assert "size" not in found and "default" not in found["magnitude"]


def test_a_renamed_column_whose_former_name_is_taken_is_taken_in() -> None:
    made = (change("column_renamed", "size", "size", "size_old"), change("column_added", "size"))
    renamed = (*with_column("size", name="size_old"), SIZE)
    found = proposed(*renamed, changes=made)
    assert {"size", "size_old"} <= found.document["properties"].keys()
    other = proposed(*renamed, live("b"), changes=(change("column_renamed", "a", "a", "b"),))
    assert not {"b", "size_old"} & other.document["properties"].keys(), "the contract named neither"


RULE = {"name": "big", "expression": "SIZE > 1 OR \"size\" = 0 OR title = 'size' OR length(title) > 2"}
REFERENCE = {"name": "sized", "columns": ["size"], "table": "sizes"}


def with_rules() -> dict[str, Any]:
    document = deepcopy(DOCUMENT)
    document["properties"]["size"] |= {"minimum": 1, "x-policy": {"minimum": "warn", "type": "quarantine"}}
    document["properties"]["title"] |= {"x-policy": {"required": "reject_batch"}}
    document["x-cdc"]["quality"] = {"rules": [dict(RULE)], "references": [dict(REFERENCE)]}
    contract_of(document, Path("t.json"))
    return document


def test_rules_follow_a_column_that_is_renamed() -> None:
    renamed = (change("column_renamed", "width", "size", "width"),)
    found = next_contract(with_rules(), form(*with_column("size", name="width")), renamed).document
    contract_of(found, Path("t.json"))
    (rule,) = found["x-cdc"]["quality"]["rules"]
    assert rule["expression"] == '"width" > 1 OR "width" = 0 OR title = \'size\' OR length(title) > 2'
    assert found["x-cdc"]["quality"]["references"] == [REFERENCE | {"columns": ["width"]}]
    assert found["properties"]["width"]["x-policy"] == {"minimum": "warn", "type": "quarantine"}


def test_what_a_person_wrote_is_taken_out_only_in_words() -> None:
    gone = next_contract(with_rules(), form(ID, TITLE, PLAN), ())
    told = "; ".join(each.what for each in gone.steps)
    contract_of(gone.document, Path("t.json"))
    assert "the rule big (SIZE > 1" in told and "sized (size) is taken out" in told
    document = with_rules()
    document["x-cdc"]["quality"]["rules"][0]["expression"] = "size IS NOT NULL"
    retyped = next_contract(document, form(*with_column("size", pg_type="text")), ())
    contract_of(retyped.document, Path("t.json"))
    assert "minimum 1" in retyped.steps[0].what
    assert "x-policy" not in retyped.document["properties"]["size"]
    assert retyped.document["x-cdc"]["quality"] == document["x-cdc"]["quality"]


def test_the_policy_of_a_rule_goes_with_the_rule() -> None:
    nullable = next_contract(with_rules(), form(*with_column("title", not_null=False)), ())
    contract_of(nullable.document, Path("t.json"))
    assert "x-policy" not in nullable.document["properties"]["title"]


def test_the_step_for_a_renamed_enum_value_says_that_only_a_read_shows_it_in_older_rows() -> None:
    renamed = with_column("plan", labels=("free", "expert"))
    (step,) = proposed(*renamed, changes=(change("enum_values_changed", "plan", "pro", "expert"),)).steps
    assert "source snapshot" in step.why
    added = with_column("plan", labels=("free", "pro", "team"))
    (step,) = proposed(*added, changes=(change("enum_value_added", "plan", None, "team"),)).steps
    assert "source snapshot" not in step.why


KEY_CHANGED = change("key_changed", None, "id", "id, size")


def test_the_key_follows_the_table_and_its_columns_may_not_be_null() -> None:
    found = proposed(ID, TITLE, SIZE_KEPT, PLAN, changes=(KEY_CHANGED,), key=("id", "size"))
    assert [(step.at, step.compatibility) for step in found.steps] == [("x-cdc.key", "breaking")]
    assert "read the table" in found.steps[0].why and found.for_a_person == ()
    assert found.document["x-cdc"]["key"] == ["id", "size"]
    assert "size" in found.document["required"] and found.document["properties"]["size"]["type"] == "integer"


def test_a_new_column_of_the_key_is_taken_in_and_one_that_is_gone_is_taken_out() -> None:
    code = live("code", "uuid", not_null=True)
    changes = (change("key_changed", None, "id", "code"), change("column_dropped", "id"))
    found = proposed(code, TITLE, SIZE, PLAN, changes=changes, key=("code",))
    assert {step.at for step in found.steps} == {"properties.code", "properties.id", "x-cdc.key"}
    assert found.document["x-cdc"]["key"] == ["code"] and "id" not in found.document["properties"]


def test_a_key_that_somebody_chose_stays_unless_the_table_got_another_one() -> None:
    """As of a table whose contract names a key that is in its replica identity."""
    found = proposed(ID, TITLE, SIZE_KEPT, PLAN, key=("id", "size"))
    assert found.document["x-cdc"]["key"] == ["id"] and found.steps == ()
    assert any("write its x-cdc.key" in each for each in found.for_a_person)


def test_a_key_of_a_column_that_readers_may_not_see_is_left_to_a_person() -> None:
    document = deepcopy(DOCUMENT)
    document["x-cdc"]["pii"] = {"size": {"policy": "drop", "note": "a secret"}}
    found = next_contract(document, form(ID, TITLE, SIZE_KEPT, PLAN, key=("id", "size")), [KEY_CHANGED])
    assert found.document["x-cdc"]["key"] == ["id"]
    assert any("size has a policy for personal data" in each for each in found.for_a_person)


def test_a_renamed_key_column_is_renamed_in_the_key() -> None:
    number = replace(ID, name="number")
    found = proposed(
        number, TITLE, SIZE, PLAN, changes=(change("column_renamed", None, "id", "number"),), key=("number",)
    )
    assert [step.at for step in found.steps] == ["properties.number"] and found.for_a_person == ()
    assert found.document["x-cdc"]["key"] == ["number"]


def test_what_no_edit_answers_is_left_to_a_person() -> None:
    assert proposed(*with_column("title"), key=("id", "title")).for_a_person
    # The key of what is not a log.
    for key, changes, left in (
        (("number",), (change("column_renamed", "id", "id", "number"),), "rename the column back"),
        (("id", "size"), (KEY_CHANGED,), "a home of its own takes it in"),
    ):
        columns = with_column("id", name="number") if key == ("number",) else (ID, TITLE, SIZE_KEPT, PLAN)
        other = next_contract(DOCUMENT, form(*columns, key=key), changes, key_follows=False)
        assert other.steps == () and any(left in each for each in other.for_a_person)
    again = proposed(*COLUMNS, changes=(change("column_added_again", "size"),))
    assert any("source snapshot" in each for each in again.for_a_person)
    added_again = change("column_added_again", "size")
    now, table = contract_of(DOCUMENT, Path("t.json")), form(*COLUMNS).seen
    assert judged(added_again, now, table, read_again=False).asks
    assert not judged(added_again, now, table, read_again=True).asks


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (live("size_in_mm", "integer"), None),
        (live("n", "integer", not_null=True), "may not be NULL"),
        (live("email"), "e-mail"),
        (live("odd name"), "its name"),
        (live("twice", generated=True), "generates"),
    ],
)
def test_what_an_additive_contract_takes_by_itself(column: LiveColumn, reason: str | None) -> None:
    why = why_not_by_itself(form(*COLUMNS, column), column.name)
    assert (why is None) if reason is None else (why is not None and reason in why)


@pytest.mark.parametrize(
    ("columns", "learns"), [((*COLUMNS, live("extra")), True), ((ID, SIZE, PLAN), False)]
)
def test_nothing_is_learned_while_a_personal_column_is_gone(
    tmp_path: Path, columns: tuple[LiveColumn, ...], learns: bool
) -> None:
    document = deepcopy(DOCUMENT)
    document["x-cdc"]["evolution"] = "additive"
    document["x-cdc"]["pii"] = {"title": {"policy": "mask", "mask": "text", "note": "Who asked for it."}}
    contract = contract_of(document, Path("tickets.json"))
    record, learned = SchemaChanges(tmp_path), LearnedColumns(tmp_path, "desk")
    # It may be the title, by a name that does not tell: the table was made anew.
    now = form(*columns) if learns else form(*columns, live("extra"))
    added = Difference("column_added", "extra", None, "text")
    record.seen(Look(1, Lsn(1), Lsn(2)), {"tickets": now.seen}, {"tickets": [added]})
    learn(record, {"tickets": contract}, {"tickets": now}, learned)
    assert set(learned.of("tickets")) == ({"extra"} if learns else set())


@pytest.mark.parametrize(("name", "learned"), [("extra", {"extra"}), ("Title", set())])
def test_a_name_that_differs_from_one_in_the_contract_only_in_case_is_not_learned(
    tmp_path: Path, name: str, learned: set[str]
) -> None:
    document = deepcopy(DOCUMENT)
    document["x-cdc"]["evolution"] = "additive"
    contracts = {"tickets": contract_of(document, Path("tickets.json"))}
    record = SchemaChanges(tmp_path)
    now = form(ID, live(name), SIZE, PLAN)
    added = Difference("column_added", name, None, "text")
    record.seen(Look(1, Lsn(1), Lsn(2)), {"tickets": now.seen}, {"tickets": [added]})
    learn(record, contracts, {"tickets": now}, LearnedColumns(tmp_path, "desk"))
    assert set(LearnedColumns(tmp_path, "desk").of("tickets")) == learned
    contract_of(with_learned(tmp_path, document), Path("tickets.json"))


def followed(document: dict[str, Any], *columns: LiveColumn, **other: Any) -> NextContract:
    """What is proposed for ``document``: a contract that can be used, and that there is nothing to add to."""
    contract_of(document, Path("t.json"))
    found = next_contract(document, form(*columns), **{"changes": ()} | other)
    contract_of(found.document, Path("t.json"))
    assert next_contract(found.document, form(*columns), **{"changes": ()} | other).steps == ()
    return found


def test_a_retyped_column_keeps_the_values_of_its_former_types() -> None:
    day = followed(deepcopy(DOCUMENT), *with_column("size", pg_type="date"))
    assert day.document["properties"]["size"]["x-former-types"] == ["integer"]
    assert "quarantined" not in day.steps[0].why
    flag = followed(day.document, *with_column("size", pg_type="boolean")).document
    assert flag["properties"]["size"]["x-former-types"] == ["date", "integer"]
    number = followed(day.document, *with_column("size", pg_type="bigint")).document
    assert number["properties"]["size"]["x-former-types"] == ["date"], "it holds every integer"
    text = followed(flag, *with_column("size", pg_type="text")).document["properties"]["size"]
    assert text["x-pg-type"] == "text" and "x-former-types" not in text, "it holds every text"
    key = proposed(*with_column("id", pg_type="date"))
    assert "x-former-types" not in key.document["properties"]["id"], "a row is known by its key's values"


@pytest.mark.parametrize("not_null", [True, False])
@pytest.mark.parametrize("required", [True, False])
def test_a_column_may_be_retyped_whatever_becomes_of_its_not_null(required: bool, not_null: bool) -> None:
    document = deepcopy(DOCUMENT)
    if required:
        document["required"].append("size")
        document["properties"]["size"]["type"] = "integer"
    found = followed(document, *with_column("size", pg_type="date", not_null=not_null)).document
    assert ("size" in found["required"]) == (required and not_null)


def private(**at_rest: str) -> dict[str, Any]:
    document = deepcopy(DOCUMENT)
    document["required"].remove("title")
    document["properties"]["title"]["type"] = ["string", "null"]
    document["x-cdc"]["pii"] = {"title": {"policy": "mask", "mask": "text", "note": "Who asked for it."}}
    document["x-cdc"]["at_rest"] = {"pii": "encrypted"} | at_rest
    return document


def test_a_policy_that_the_new_type_cannot_have_leaves_the_column_out_until_a_person_decides() -> None:
    document = private()
    document["x-cdc"]["pii"]["size"] = {"policy": "hash", "note": "A badge."}
    found = followed(document, *with_column("size", pg_type="boolean"))
    assert found.document["x-cdc"]["pii"]["size"] == {"policy": "drop", "note": "A badge."}
    assert found.document["x-cdc"]["pii"]["title"]["policy"] == "mask"
    assert any("size leaves the column out" in each and "hash" in each for each in found.for_a_person)


def test_a_rule_that_the_new_type_cannot_have_is_taken_out_in_words() -> None:
    document = with_rules()
    document["x-cdc"]["quality"]["rules"][0]["expression"] = "abs(size) > 2"
    found = followed(document, *with_column("size", pg_type="date"))
    assert found.document["x-cdc"]["quality"]["rules"] == []
    (step,) = [each for each in found.steps if each.at == "x-cdc.quality.rules"]
    assert "big (abs(size) > 2) is taken out" in step.what and "does not fit the types" in step.why


@pytest.mark.parametrize("form", ["encrypted", "plain"])
def test_whose_the_values_are_follows_a_column_that_is_renamed_and_holds_one_that_is_gone(form: str) -> None:
    document = private(pii=form, subject="size", subject_column="size")
    renamed = (change("column_renamed", "size", "size", "width"),)
    columns = (ID, replace(TITLE, not_null=False), PLAN)
    found = followed(document, *columns, replace(SIZE, name="width"), changes=renamed)
    assert found.document["x-cdc"]["at_rest"]["subject_column"] == "width"
    gone = followed(document, *columns)
    assert any("size is gone" in each for each in gone.for_a_person)
    last = followed(document, ID, SIZE, PLAN)
    assert any("title is gone" in each for each in last.for_a_person), "a subject needs a personal column"


@pytest.mark.parametrize("at_rest", [{}, {"pii": "plain", "subject": "customer"}])
def test_a_new_personal_column_of_a_subject_may_be_null_in_the_contract(at_rest: dict[str, str]) -> None:
    email = live("email", not_null=True)
    columns = (*with_column("title", not_null=False), email)
    document = private(**at_rest)
    found = followed(document, *columns, changes=(change("column_added", "email"),)).document
    assert "email" not in found["required"] and found["properties"]["email"]["type"] == ["string", "null"]


@pytest.mark.parametrize(
    ("declared", "length", "now", "found"),
    [
        ("text", 10, None, 10),
        ("character varying(40)", 10, 40, 10),
        ("character varying(40)", 10, 80, 10),
        ("character varying(40)", 40, 80, 80),
        ("character varying(40)", 80, 120, 120),
        ("character varying(40)", 40, None, None),
    ],
)
def test_a_length_that_somebody_wrote_stays_and_one_of_the_type_follows_it(
    declared: str, length: int, now: int | None, found: int | None
) -> None:
    document = deepcopy(DOCUMENT)
    document["properties"]["title"] |= {"x-pg-type": declared, "maxLength": length}
    pg_type = "text" if now is None else f"character varying({now})"
    next_one = next_contract(document, form(*with_column("title", pg_type=pg_type, max_length=now)), ())
    assert next_one.document["properties"]["title"].get("maxLength") == found


def test_the_last_policy_for_personal_data_stays_though_its_column_is_gone() -> None:
    document = deepcopy(DOCUMENT)
    mask = {"policy": "mask", "mask": "text", "note": "Who asked for it."}
    document["x-cdc"]["pii"] = {"title": mask, "size": {"policy": "keep", "note": "Of nobody."}}
    gone = (change("column_dropped", "title"), change("column_dropped", "size"))
    found = next_contract(document, form(ID, PLAN), gone)
    assert found.document["x-cdc"]["pii"] == {"title": mask} and "title" in found.document["properties"]
    assert "size" not in found.document["properties"]
    [told] = [each for each in found.for_a_person if "uncovered" in each]
    assert told.startswith("title is gone")
    document["x-cdc"]["pii"]["plan"] = mask
    found = next_contract(document, form(ID, PLAN), gone)
    assert "title" not in found.document["properties"], "another column has a policy"


def test_a_contract_that_encrypts_learns_no_column_by_itself(tmp_path: Path) -> None:
    """What it does not name lands encrypted, and would be readable from then on."""
    document = deepcopy(DOCUMENT)
    document["x-cdc"] |= {
        "evolution": "additive",
        "at_rest": {"pii": "encrypted", "subject": "customer"},
        "pii": {"title": {"policy": "mask", "mask": "text", "note": "Who asked for it."}},
    }
    document["required"].remove("title")
    document["properties"]["title"]["type"] = ["string", "null"]
    record, learned, now = (
        SchemaChanges(tmp_path),
        LearnedColumns(tmp_path, "desk"),
        form(*COLUMNS, live("extra")),
    )
    added = Difference("column_added", "extra", None, "text")
    record.seen(Look(1, Lsn(1), Lsn(2)), {"tickets": now.seen}, {"tickets": [added]})
    learn(record, {"tickets": contract_of(document, Path("tickets.json"))}, {"tickets": now}, learned)
    assert not learned.of("tickets")


MASK = {"policy": "mask", "mask": "text", "note": "A name."}


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_personal_column_whose_former_name_is_taken_keeps_its_policy(encrypted: bool) -> None:
    document = private() if encrypted else deepcopy(DOCUMENT)
    document["x-cdc"]["pii"] = {"title": MASK}
    renamed = (change("column_renamed", "title", "title", "t_old"), change("column_added", "title"))
    columns = (*with_column("title", name="t_old", not_null=False), live("title"))
    found = followed(document, *columns, changes=renamed)
    assert found.document["x-cdc"]["pii"] == {"title": MASK, "t_old": MASK}
    assert any(each.startswith("t_old has the policy mask") for each in found.for_a_person)
    asks = judged(renamed[0], contract_of(document, Path("t.json")), form(*columns).seen, read_again=False)
    assert asks.edit == "omnisupport-ingest contracts propose tickets --write"


NOTE = live("note")
TAKEN_NAMES = {
    "its owner is gone": (
        (change("column_dropped", "note"), change("column_renamed", "title", "title", "note")),
        (ID, SIZE, PLAN, NOTE),
        {"note"},
    ),
    "swapped": (
        (
            change("column_renamed", "title", "title", "note"),
            change("column_renamed", "note", "note", "title"),
        ),
        (*COLUMNS, NOTE),
        {"note", "title"},
    ),
}


@pytest.mark.parametrize(("made", "columns", "covered"), TAKEN_NAMES.values(), ids=TAKEN_NAMES)
def test_a_policy_follows_a_personal_column_onto_the_name_of_another(
    made: tuple[SchemaChange, ...], columns: tuple[LiveColumn, ...], covered: set[str]
) -> None:
    document = draft(form(*COLUMNS, NOTE).live, source="desk", name="tickets", owner="team:desk").document
    document["x-cdc"]["pii"] = {"title": MASK}
    found = followed(document, *columns, changes=made)
    assert found.document["x-cdc"]["pii"] == dict.fromkeys(covered, MASK)
    assert found.compatibility == "breaking"
    before, now = (contract_of(each, Path("t.json")) for each in (document, found.document))
    assert shown_under_another_name(before, made) == {"note": "title"}
    assert shown_under_another_name(now, made) == {}
    asks = judged(made[-1 if len(covered) == 1 else 0], before, form(*columns).seen, read_again=False)
    assert asks.edit.startswith("omnisupport-ingest contracts propose tickets --write")


def test_a_name_that_a_personal_column_had_only_for_a_time_needs_no_policy() -> None:
    document = draft(form(*COLUMNS, NOTE).live, source="desk", name="tickets", owner="team:desk").document
    document["x-cdc"]["pii"] = {"title": MASK}
    there = change("column_renamed", "title", "title", "note")
    back = change("column_renamed", "note", "note", "title")
    back = replace(back, noticed_at=datetime(2026, 11, 25, tzinfo=UTC))
    assert shown_under_another_name(contract_of(document, Path("t.json")), (there, back)) == {}
    assert followed(document, *COLUMNS, NOTE, changes=(there, back)).steps == ()


def test_a_default_goes_with_the_type_or_the_column_that_it_was_said_of() -> None:
    document = deepcopy(DOCUMENT)
    document["properties"]["size"]["default"] = "5"

    def default(pg_type: str, *made: SchemaChange) -> str | None:
        now = form(*with_column("size", pg_type=pg_type))
        return next_contract(document, now, made).document["properties"]["size"].get("default")

    assert default("bigint") == "5", "the server keeps the value"
    assert default("date") is None
    assert default("integer", change("column_added_again", "size")) is None


def test_a_default_that_its_type_refuses_is_not_learned(tmp_path: Path) -> None:
    document = deepcopy(DOCUMENT)
    document["x-cdc"]["evolution"] = "additive"
    record, learned = SchemaChanges(tmp_path), LearnedColumns(tmp_path, "desk")
    now = form(*COLUMNS, live("n", "date"))
    added = Difference("column_added", "n", None, "date")
    record.seen(Look(1, Lsn(1), Lsn(2)), {"tickets": now.seen}, {"tickets": [added]})
    learn(record, {"tickets": contract_of(document, Path("t.json"))}, {"tickets": now}, learned)
    assert "default" not in learned.of("tickets")["n"], "7 is no date"
    contract_of(with_learned(tmp_path, document), Path("t.json"))
