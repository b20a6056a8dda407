"""Every query that docs/query.md shows runs on a real lake, in the engine that it names."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs" / "query.md"
OURS = {
    ".omnisupport/lake/support_desk": "home/lake/desk",
    "dim_tickets": "dim_notes",
    "'tickets'": "'notes'",
    '"status"': '"title"',
    "status,": "title,",
    "id, status FROM": "id, title FROM",
    "BY status": "BY title",
    "'channel'": "'body'",
}
"""What the page calls tables and columns, and what this test's lake has."""


@pytest.mark.parametrize("engine", ["polars", "duckdb", "to_pandas", "SparkSession", "raw_cdc_staging"])
def test_what_the_page_shows_can_be_run(
    engine: str,
    whole: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(whole)
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    chosen = [textwrap.dedent(block) for block in blocks if engine in block]
    assert chosen
    for code in chosen:
        for theirs, ours in OURS.items():
            code = code.replace(theirs, ours)
        exec(compile(code, str(PAGE), "exec"), {})
    assert re.search(r"one|text|1", capsys.readouterr().out)
