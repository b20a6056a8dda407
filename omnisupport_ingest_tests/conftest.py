"""Fixtures that cost seconds to make and are shared by the whole test session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import hypothesis
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.sources.postgres.embedded import binaries
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest_tests.class_archive import make_class_archive
from omnisupport_ingest_tests.jvm import start_for_small_work

start_for_small_work()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--postgres",
        default=binaries.DEFAULT_VERSION,
        help="Server of the tests: a major version of the wheel, or the folder of an installed PostgreSQL.",
    )

    parser.addoption(
        "--explore",
        action="store_true",
        help="Only property tests that need neither Spark nor a server; see explore.py.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make new servers of this process those that ``--postgres`` names."""
    server = Path(config.getoption("--postgres"))
    if (server / "bin" / "postgres").is_file():
        binaries.programs = lambda version, uid, copies: server / "bin"
    else:
        binaries.bundled(str(server))
        binaries.DEFAULT_VERSION = str(server)


_BUSY = frozenset(("proof", "stages", "recovery", "cdc", "cli", "defs", "oracle"))
"""Rooms whose tests keep the cores busy, with Spark above all."""

_WAITING = frozenset(("sources", "runtime"))
"""Rooms whose tests wait for servers and processes most of the time."""


_HEAVY = frozenset(("spark", "postgres"))
"""Fixtures that take longer to make than a property test has in a minute of exploring."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the files that wait evenly among the busy ones, so that several processes use the cores well.

    The short tests come last and fill the gaps at the end; the longest test of all comes first. What explores
    leaves out all but property tests, and keeps their order.
    """
    if config.getoption("--explore"):
        kept = [item for item in items if _is_property(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
        return
    here = Path(__file__).parent
    files = list(dict.fromkeys(item.path for item in items))
    rooms = {file: file.relative_to(here).parts[0] for file in files}
    turns: dict[Path, float] = {}
    for room_names in (_BUSY, _WAITING):
        of_these = [file for file in files if rooms[file] in room_names]
        of_these.sort(key=lambda file: rooms[file] != "proof")
        turns |= {file: turn / len(of_these) for turn, file in enumerate(of_these)}
    items.sort(key=lambda item: turns.get(item.path, 1.0))


def _is_property(item: pytest.Item) -> bool:
    is_drawn = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
    return is_drawn and _HEAVY.isdisjoint(getattr(item, "fixturenames", ()))


# The suite is the same for everyone; `make explore` looks for new examples. What it finds must depend neither
# on what this machine has found before nor on how busy it is. Where CI is in the
# environment, Hypothesis starts from other defaults (derandomized), so both profiles say what they rely on.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile(
    "explore",
    derandomize=False,
    deadline=None,
    max_examples=300,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A running PostgreSQL; a test that needs an empty place makes a database of its own in it."""
    server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres") / "server")
    server.start()
    with closing(connect(server.dsn())) as connection, connection.cursor() as cursor:
        # No test cuts the power; what a killed process has written is there without it.
        cursor.execute("ALTER SYSTEM SET fsync = off")
        cursor.execute("SELECT pg_reload_conf()")
    yield server
    server.destroy()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A classic session on two cores that keeps time and errors as the platform does; loopback, no UI."""
    make_class_archive()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = (
        SparkSession.builder.master("local[2]")
        .appName("omnisupport_ingest_tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.ansi.enabled", "true")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.sql.constraintPropagation.enabled", "false")
        .config("spark.python.sql.dataFrameDebugging.enabled", "false")
        .config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        .getOrCreate()
    )
    yield session
    session.stop()
