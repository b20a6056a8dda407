"""What is read of files that closing folded into others: the rule as a truth table."""

from __future__ import annotations

import pytest

from omnisupport_ingest.layers.plan import InputFiles

COMPACTED = {"ab": ("a", "b")}
BEGIN_AGAIN = None


@pytest.mark.parametrize(
    ("files", "wanted", "read"),
    [
        pytest.param([], "", set(), id="nothing is there"),
        pytest.param(["a", "b"], "ab", {"a", "b"}, id="nothing is folded, all is new"),
        pytest.param(["a", "b"], "b", {"b"}, id="nothing is folded, one is new"),
        pytest.param(["ab"], "ab", {"ab"}, id="all that is folded is new"),
        pytest.param(["ab"], "", set(), id="all that is folded was taken"),
        pytest.param(["ab"], "b", BEGIN_AGAIN, id="some of what is folded was taken"),
        pytest.param(["ab", "c"], "c", {"c"}, id="a late file beside what was taken"),
        pytest.param(["ab", "c"], "abc", {"ab", "c"}, id="a late file beside what is new"),
        pytest.param(["ab", "c"], "bc", BEGIN_AGAIN, id="a late file beside what was taken in part"),
    ],
)
def test_files_to_read(files, wanted, read):
    assert InputFiles(tuple(files), COMPACTED).holding(frozenset(wanted)) == read


def test_a_file_stands_for_what_was_folded_into_it_however_often():
    once = InputFiles(("ab", "c"), COMPACTED)
    assert once.units == {"a", "b", "c"}
    assert InputFiles(("abc",), {"abc": sorted(once.units)}).units == once.units
