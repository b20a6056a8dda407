"""Whatever tables are called at the source, their names in the lake are plain and apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.contracts.names import PLAIN_NAME, lake_name, lake_names

TABLES = st.lists(
    st.tuples(
        st.sampled_from(["public", "shop", "My Schema"]), st.text(st.characters(codec="utf-8"), min_size=1)
    ),
    unique=True,
)


def test_a_plain_name_stays() -> None:
    assert lake_names([("public", "Orders_2")], {}) == {("public", "Orders_2"): "Orders_2"}


def test_other_names_read_like_the_table() -> None:
    assert lake_name("Weird Name") == "Weird_Name"
    assert lake_name("2fast") == "table_2fast"
    assert lake_name("表").startswith("table_")
    assert lake_name("表") != lake_name("列")


def test_one_table_name_in_two_schemas_carries_the_schema() -> None:
    tables = [("public", "orders"), ("shop", "orders"), ("shop", "lines")]
    assert lake_names(tables, {}) == {
        ("public", "orders"): "public_orders",
        ("shop", "orders"): "shop_orders",
        ("shop", "lines"): "lines",
    }


def test_a_table_keeps_the_name_that_it_has() -> None:
    taken = {("public", "orders"): "orders"}
    assert lake_names([("shop", "orders"), ("public", "orders")], taken) == {
        ("public", "orders"): "orders",
        ("shop", "orders"): "shop_orders",
    }


@given(tables=TABLES, taken=TABLES)
def test_names_are_plain_and_differ_in_more_than_case(
    tables: list[tuple[str, str]], taken: list[tuple[str, str]]
) -> None:
    before = lake_names(taken, {})
    found = lake_names(tables, before)
    assert set(found) == set(tables)
    assert all(PLAIN_NAME.fullmatch(name) for name in found.values())
    in_use = [name.lower() for name in (before | found).values()]
    assert len(set(in_use)) == len(in_use)
    assert lake_names(tables[::-1], before) == found
