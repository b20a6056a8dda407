"""Reading a dimension that is being updated, beside the same rows in large files (P5).

A dimension lies in files of bounded size, so that an update rewrites few; what does that cost who reads it?
Before each round a hundred scattered keys are updated. DuckDB, Polars and Spark read both forms in turn.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click
import duckdb
import polars as pl

from bench.landed import now
from bench.merge import Table
from bench.report import write_result
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIMIT = 1.5

_QUESTIONS = {
    "narrow": "SELECT status, count(*), max(updated_at) FROM t WHERE NOT _cdc_is_deleted GROUP BY status",
    "wide": "SELECT sum(length(body)), sum(length(metadata)), min(customer_id), max(subject) FROM t",
    "one key": "SELECT * FROM t WHERE id = 12345",
}


@click.command()
@click.option("--rows", default=5_000_000, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Rounds.")
@click.option("--seed", default=1, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where homes are made.")
def main(rows: int, repeats: int, seed: int, folder: Path | None) -> None:
    """Measure reads of both forms, and print the figures."""
    scratch = Path(tempfile.mkdtemp(prefix="bench-reading-", dir=folder))
    settings = Settings(home=scratch / "spark", spark_driver_memory="2g", _env_file=None)  # type: ignore[call-arg]
    spark = classic_session(settings)
    took: dict[str, list[float]] = defaultdict(list)
    try:
        table = Table.made(scratch, rows, 0, seed, spark)
        for number in range(repeats + 1):
            table.stream.scattered(100, now())
            table.take_in()
            snapshot = table.workspace.dimension(table.contract).open()
            ours = [file.uri for file in snapshot.all_files()]
            large = _in_large_files(ours, scratch / f"large-{number}")
            for engine, read in (("DuckDB", _duckdb), ("Polars", _polars), ("Spark", _spark(spark))):
                for question, query in _QUESTIONS.items():
                    for form, files in (("ours", ours), ("large", large)):
                        began = time.perf_counter()
                        read(files, query)
                        if number:
                            # The first round warms every engine up.
                            took[f"{engine} {question} {form}"].append(time.perf_counter() - began)
            shutil.rmtree(scratch / f"large-{number}")
            click.echo(f"  {number}/{repeats}: {len(ours)} files beside {len(large)}", err=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    ratios = {}
    for name in dict.fromkeys(each.rpartition(" ")[0] for each in took):
        mine, theirs = took[f"{name} ours"], took[f"{name} large"]
        ratios[name] = median(mine) / median(theirs)
        click.echo(
            f"  {name:<16} {median(mine):7.3f} s ({min(mine):.3f} to {max(mine):.3f}), large files "
            f"{median(theirs):7.3f} s ({min(theirs):.3f} to {max(theirs):.3f}), ratio {ratios[name]:.2f}"
        )
    worst = max(value for name, value in ratios.items() if "one key" not in name)
    click.echo(
        f"  highest ratio of a scan {worst:.2f} (limit {LIMIT}): {'met' if worst <= LIMIT else 'NOT MET'}"
    )
    write_result("reading", {"rows": rows, "seconds": took, "ratios": ratios})


def _in_large_files(files: Sequence[str], folder: Path) -> list[str]:
    """The same rows in their order, in row groups of the size that DuckDB chooses."""
    folder.mkdir()
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute(
            f"COPY (SELECT * FROM read_parquet({list(files)})) TO '{folder / 'all'}'"
            " (FORMAT parquet, FILE_SIZE_BYTES '512MB')"
        )
    return sorted(str(path) for path in folder.rglob("*.parquet"))


def _duckdb(files: Sequence[str], query: str) -> None:
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute(f"WITH t AS (FROM read_parquet({list(files)})) {query}").fetchall()


def _polars(files: Sequence[str], query: str) -> None:
    rows = pl.scan_parquet(list(files), extra_columns="ignore")
    pl.SQLContext(t=rows).execute(query).collect()


def _spark(spark: SparkSession) -> Callable[[Sequence[str], str], None]:
    def read(files: Sequence[str], query: str) -> None:
        spark.read.parquet(*(f"file://{path}" for path in files)).createOrReplaceTempView("t")
        spark.sql(query).collect()

    return read


if __name__ == "__main__":
    main()
