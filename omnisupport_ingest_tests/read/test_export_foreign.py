"""Files of a dimension that something has damaged: ``export`` writes them or names what it cannot read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.read.export import ExportFailed, Format, NoDimension, write_file
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import IN_THE_PLACE, in_time
from omnisupport_ingest_tests.read.test_export import COLUMNS, ROWS, SYSTEM
from omnisupport_ingest_tests.read.test_export import contract as contract
from omnisupport_ingest_tests.read.test_export import lake_file as lake_file

same_folder = settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
OTHER_TYPES = [pa.string(), pa.int8(), pa.bool_(), pa.list_(pa.int64()), pa.null(), pa.timestamp("s")]


def written_or_named(contract: TableContract, file: Path, out: Path, form: Format) -> None:
    """``file`` is exported whole, or refused by name and nothing is left of the attempt."""
    out.write_text("before")
    with in_time():
        try:
            done = write_file(contract, [str(file)], out, form, deleted=True, home=file.parent)
        except (ExportFailed, NoDimension) as refused:
            assert "desk.things" in refused.problem and refused.fix
            assert 'a "quoted"' not in refused.problem + refused.fix, "no value of a row"
            assert out.read_text() == "before"
        else:
            assert done.bytes == out.stat().st_size
    assert [each.name for each in out.parent.iterdir()] == [out.name]


@same_folder
@given(
    at=st.floats(0, 1),
    what=st.binary(min_size=1, max_size=6),
    cut=st.booleans(),
    form=st.sampled_from(Format),
)
def test_any_bytes_in_a_file_of_a_dimension_are_exported_or_named(
    contract: TableContract, lake_file: str, tmp_path: Path, at: float, what: bytes, cut: bool, form: Format
) -> None:
    content = Path(lake_file).read_bytes()
    place = int(at * len(content))
    damaged = tmp_path / "part.parquet"
    damaged.write_bytes(content[:place] + what + (b"" if cut else content[place + len(what) :]))
    (tmp_path / "out").mkdir(exist_ok=True)
    written_or_named(contract, damaged, tmp_path / "out" / "things", form)


@pytest.mark.parametrize("what", [*IN_THE_PLACE, "nothing"])
def test_what_stands_in_the_place_of_a_file_of_a_dimension_is_named_and_not_waited_for(
    contract: TableContract, tmp_path: Path, what: str
) -> None:
    file = tmp_path / "part.parquet"
    if what != "nothing":
        IN_THE_PLACE[what](file)
    (tmp_path / "out").mkdir()
    with in_time(), pytest.raises(ExportFailed, match=r"desk\.things"):
        write_file(
            contract, [str(file)], tmp_path / "out" / "things.csv", Format.CSV, deleted=False, home=tmp_path
        )
    assert list((tmp_path / "out").iterdir()) == []


@same_folder
@given(
    name=st.sampled_from([*COLUMNS, *SYSTEM.names]),
    other=st.none() | st.sampled_from(OTHER_TYPES),
    form=st.sampled_from(Format),
)
def test_a_file_of_a_dimension_that_lacks_a_column_or_has_it_of_another_type_is_exported_or_named(
    contract: TableContract, tmp_path: Path, name: str, other: pa.DataType | None, form: Format
) -> None:
    schema = pa.schema([*((each, kind) for each, (_, _, kind) in COLUMNS.items()), *SYSTEM])
    table = pa.Table.from_pylist(ROWS, schema)
    place = schema.get_field_index(name)
    column = None if other is None else pa.nulls(len(ROWS), other)
    table = table.remove_column(place) if column is None else table.set_column(place, name, column)
    file = tmp_path / "part.parquet"
    pq.write_table(table, file)
    (tmp_path / "out").mkdir(exist_ok=True)
    written_or_named(contract, file, tmp_path / "out" / "things", form)
