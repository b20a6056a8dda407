"""A contract that gives a table another key than what has landed bears is refused before anything lands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omnisupport_ingest.sources.postgres.preflight.source_check import check_source
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("tenant", "id", "v")


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """A captured table ``tickets``, its key two of its columns."""
    source.sql("CREATE TABLE tickets (tenant int, id int, v text, PRIMARY KEY (tenant, id))")
    source.sql("INSERT INTO tickets SELECT g % 3, g, 'old' FROM generate_series(1, 20) g")
    source.tables.append(contract("tickets", COLUMNS, key=("tenant", "id")))
    source.catch_up()
    source.wait_for_free_slot()
    return source


@pytest.mark.parametrize("seen", ["read", "read, and streamed"])
@pytest.mark.parametrize("key", [("id",), ("id", "tenant"), ("tenant", "id", "v")], ids=" ".join)
def test_another_key_than_what_has_landed_is_refused_and_the_old_one_goes_on(
    tickets: SourceUnderTest, key: tuple[str, ...], seen: str
) -> None:
    if seen != "read":
        tickets.sql("UPDATE tickets SET v = 'streamed' WHERE id = 4")
        tickets.catch_up()
    (before,) = tickets.tables
    landed = tickets.store.batch_ids()
    tickets.sql("UPDATE tickets SET v = 'new' WHERE id = 5", "DELETE FROM tickets WHERE id = 6")
    tickets.tables[0] = replace(before, key=key)
    for begin in (tickets.catch_up, lambda: tickets.capture().begin_new_epoch("another key")):
        with pytest.raises(PreflightFailed) as refused:
            begin()
        assert f"the key ({', '.join(key)})" in str(refused.value)
        assert "has the key (tenant, id)" in str(refused.value)
    found = check_source(tickets.dsn, tickets.settings, tickets.home, tickets.tables)
    assert found[0].check == "landed_key"
    assert tickets.store.batch_ids() == landed and len(tickets.store.epochs()) == 1
    tickets.tables[0] = before
    tickets.catch_up()
    of_source = {
        f'["{tenant}", "{id_}"]': v for tenant, id_, v in tickets.query("SELECT tenant, id, v FROM tickets")
    }
    in_lake = {key: row["v"] for key, row in folded(tickets.events(), "tickets").items()}
    assert in_lake == of_source
