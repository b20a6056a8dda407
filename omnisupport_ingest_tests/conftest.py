"""Fixtures that cost seconds to make and are shared by the whole test session."""

from __future__ import annotations

import gc
import os
import re
import secrets
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlencode

import hypothesis
import pytest
from psycopg2.extensions import parse_dsn
from pydantic import SecretStr
from pyspark.sql import SparkSession

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.spark import WORKER_DAEMON, workers_environment
from omnisupport_ingest.runtime.spark_connect import start_spark_connect
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.embedded import binaries
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest_tests.class_archive import make_class_archive
from omnisupport_ingest_tests.jvm import start_for_small_work
from omnisupport_ingest_tests.storage.s3_server import S3Server, reserved_port, s3_server

start_for_small_work()

# Held from now on: the server starts minutes later, and until then nothing else may be given its port.
_S3_PORT = reserved_port()
_S3 = S3Server(_S3_PORT.getsockname()[1])
# Before anything starts a JVM, whose workers inherit them. The first test of it starts the server.
os.environ.update(_S3.variables)


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

    parser.addoption(
        "--sample", metavar="COUNT:SEED", help="Only COUNT of the chosen tests, drawn by the number SEED."
    )

    parser.addoption(
        "--draw",
        metavar="NUMBER",
        default="0",
        help="Which of their many parameters the tests that are marked `drawn` run with; `all`: with all.",
    )

    parser.addoption(
        "--turns",
        metavar="COUNT",
        type=int,
        default=1,
        help="Files with stories on real servers take turns: run one of COUNT parts, which `--draw` chooses.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make new servers of this process those that ``--postgres`` names."""
    server = Path(config.getoption("--postgres"))
    if (server / "bin" / "postgres").is_file():
        binaries.programs = lambda version, uid, copies: server / "bin"
    else:
        binaries.bundled(str(server))
        binaries.DEFAULT_VERSION = str(server)


_HERE = Path(__file__).parent

_WAITING = frozenset(("sources", "runtime"))
"""Folders whose tests wait for servers and processes most of the time; the others keep the cores busy."""


_REAL = frozenset(("spark", "postgres", "awkward", "broker", "warm", "s3"))
"""Fixtures that are a real server or a Spark session."""

_QUICK = "pytest.mark.quick"

_REAL_FOLDERS = frozenset(("cli", "defs", "proof", "recovery", "verify"))
"""Folders whose tests start processes, or make Dagster instances, and say so by no fixture."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays until the end: looking through it for garbage again and again is of no use."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Libraries complain of what is not let go when the process ends."""
    gc.unfreeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` imports no file of which it runs nothing, where that is certain of its text alone."""
    if _leaves_out_full(config) and is_full_by_its_text(collection_path):
        return True
    return None


def is_full_by_its_text(file: Path) -> bool:
    """Whether ``file`` has tests that are ``full`` by their folder, and none that is ``quick``."""
    is_one = file.name.startswith("test_") and file.suffix == ".py" and file.is_relative_to(_HERE)
    return is_one and _folder(file) in _REAL_FOLDERS and _QUICK not in file.read_text()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Mark what is not in `make test`, let ``-m`` and ``-k`` choose, and put in order what was chosen."""
    for item in items:
        if _is_real(item) and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.full)
    yield
    if (number := config.getoption("--draw")) != "all":
        _keep(config, items, _drawn(items, number))
        if (turns := config.getoption("--turns")) > 1:
            _keep(config, items, _in_turn(items, turns, int(number)))
    if config.getoption("--explore"):
        _keep(config, items, [item for item in items if _is_property(item)])
    elif (drawn := config.getoption("--sample")) is not None:
        count, seed = (int(each) for each in drawn.split(":"))
        chosen = sorted(items, key=lambda item: item.nodeid)
        Random(seed).shuffle(chosen)
        _keep(config, items, chosen[:count])
    else:
        _put_in_order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """`make test` has few stories on real servers: one process runs them, on one warm Spark and PostgreSQL.

    Where all are run they are too many for one process, and each file goes to whoever is free.
    """
    if config.getoption("dist") != "loadfile" or not _leaves_out_full(config):
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneForStories(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return OneForStories(config, log)


def _leaves_out_full(config: pytest.Config) -> bool:
    return "not full" in config.getoption("markexpr")


def scope_of(nodeid: str) -> str:
    """What one process runs together in `make test`: the file of a test, or all files with stories."""
    file = nodeid.partition("::")[0]
    return "stories" if _has_quick_story(file) else file


@cache
def _has_quick_story(file: str) -> bool:
    """Whether ``file``, from the repository on, has quick tests on Spark or a source.

    As its text says: the process that gives out the tests has collected none.
    """
    text = (_HERE.parent / file).read_text()
    return _QUICK in text and (re.search(r"\bspark\b", text) is not None or "/sources/" in file)


def _drawn(items: Iterable[pytest.Item], number: str) -> Iterator[pytest.Item]:
    """Yield ``items``, but of a test marked ``drawn(count)`` only ``count``, which ``number`` draws.

    They are drawn one from each of ``count`` equal parts, so that neighbours are not drawn together.
    """
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn") is None:
            yield item
        else:
            of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, many in of_test.items():
        marker = many[0].get_closest_marker("drawn")
        assert marker is not None
        lot, count = Random(f"{number} {name}"), min(marker.args[0], len(many))
        bounds = [len(many) * part // count for part in range(count + 1)]
        yield from (many[lot.randrange(*part)] for part in pairwise(bounds))


def _in_turn(items: list[pytest.Item], turns: int, number: int) -> Iterator[pytest.Item]:
    """Yield ``items``, but of the stories only those of the files whose turn ``number`` chooses.

    Each of the ``turns`` takes about as long as the others.
    """
    stories = [item for item in items if _is_story(item)]
    seconds = _seconds_by_file(stories)
    parts: list[list[Path]] = [[] for _ in range(turns)]
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        min(parts, key=lambda part: sum(seconds[each] for each in part)).append(file)
    chosen = set(parts[number % turns])
    for item in items:
        if item.path in chosen or not _is_story(item):
            yield item


def _is_story(item: pytest.Item) -> bool:
    """Whether `make test` leaves the test to `make test-all`."""
    return any(item.get_closest_marker(mark) is not None for mark in ("full", "slow"))


def _keep(config: pytest.Config, items: list[pytest.Item], kept: Iterable[pytest.Item]) -> None:
    """Deselect all but ``kept``; the order stays."""
    wanted = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]


_LONG = {
    "proof/test_proof.py": 1000,
    "cli/test_up.py": 540,
    "review/test_erasure.py": 500,
    "proof/test_ways.py": 350,
    "runtime/test_long_work.py": 420,
    "sources/test_encrypted_ways.py": 390,
    "cli/test_many_sources.py": 380,
    "retention/test_superseded_rows.py": 310,
    "runtime/test_cluster_without_home.py": 300,
    "layers/test_deletion_vectors.py": 280,
    "layers/test_purge.py": 270,
    "sources/postgres/catalog/test_every_schema_change.py": 330,
    "sources/postgres/test_encrypted_at_rest.py": 260,
    "review/test_reviews.py": 240,
    "cli/test_demo.py": 230,
    "cli/test_social_operations.py": 300,
    "layers/test_marking_rows.py": 230,
    "layers/test_damaged_state.py": 220,
    "layers/test_privacy.py": 230,
    "cdc/test_kernel_fold.py": 220,
    "layers/test_delayed_merge.py": 220,
    "proof/test_bucket.py": 210,
    "recovery/test_sensor_kill.py": 210,
    "cli/test_runbooks.py": 200,
    "sources/debezium/test_story.py": 200,
    "storage/test_story.py": 200,
    "recovery/test_kill.py": 200,
    "runtime/test_cluster_large.py": 200,
    "storage/test_two_machines.py": 200,
    "layers/test_layers.py": 200,
    "sources/postgres/catalog/test_lost_changes.py": 190,
    "cli/test_sync.py": 190,
    "cli/test_earlier_homes.py": 190,
    "test_tutorial.py": 190,
    "layers/test_history.py": 170,
    "sources/kafka/test_story.py": 170,
    "cdc/test_kernel_history_update.py": 170,
    "cli/test_source_repair.py": 170,
    "cli/test_windows.py": 160,
    "sources/postgres/capture/test_parked.py": 160,
    "cli/test_many_slots.py": 150,
    "sources/postgres/session/test_faults_connection.py": 150,
    "cdc/test_history.py": 120,
    "sources/postgres/catalog/test_changed_key.py": 100,
    "targets/test_target.py": 100,
    "cli/test_sync_query_kafka.py": 100,
    "cdc/test_fold_properties.py": 100,
}
"""Files that take longest, in seconds beside others on two busy cores: none must begin near the end."""


def _put_in_order(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that several processes end together.

    Those that wait are spread evenly among the busy ones, so that the cores are used well.
    """
    seconds = _seconds_by_file(items)
    turns: dict[Path, float] = {}
    for waits in (False, True):
        of_these = [file for file in seconds if (_folder(file) in _WAITING) is waits]
        of_these.sort(key=lambda file: -seconds[file])
        turns |= {file: turn / len(of_these) for turn, file in enumerate(of_these)}
    items.sort(key=lambda item: turns[item.path])


def _seconds_by_file(items: Iterable[pytest.Item]) -> dict[Path, float]:
    """About how long the files of ``items`` take."""
    seconds: dict[Path, float] = {}
    for item in items:
        seconds[item.path] = seconds.get(item.path, 0.0) + _seconds(item)
    return seconds | {_HERE / name: known for name, known in _LONG.items() if _HERE / name in seconds}


def _seconds(item: pytest.Item) -> float:
    """About how long a test takes."""
    if item.get_closest_marker("slow") is not None:
        return 12.0
    return 1.5 if item.get_closest_marker("full") is not None else 0.05


def _folder(file: Path) -> str:
    return file.relative_to(_HERE).parts[0]


def _is_property(item: pytest.Item) -> bool:
    is_drawn = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
    return is_drawn and not _has_real_fixture(item)


def _is_real(item: pytest.Item) -> bool:
    """Whether a test is on a real server, Spark, Dagster or processes.

    Of those `make test` runs a few stories, which are marked ``quick``.
    """
    return _folder(item.path) in _REAL_FOLDERS or _has_real_fixture(item)


def _has_real_fixture(item: pytest.Item) -> bool:
    return not _REAL.isdisjoint(getattr(item, "fixturenames", ()))


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
hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, max_examples=15)
hypothesis.settings.load_profile("same")


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """The S3 server of the session; its variables are in the environment."""
    with s3_server(_S3.port) as server:
        yield server


@pytest.fixture(params=["folders", "bucket"])
def kept_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Where the home of the test keeps landing and lake: None for its folders, else a bucket's URL; new homes
    take it from the environment."""
    if request.param == "folders":
        return None
    place: str = request.getfixturevalue("s3").place()
    monkeypatch.setenv("OMNISUPPORT_STORAGE", place)
    return place


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


@pytest.fixture
def records(postgres: EmbeddedPostgres) -> Iterator[SecretStr]:
    """The address of an empty database for Dagster's records; it is gone after the test."""
    name = f"records_{secrets.token_hex(4)}"
    with closing(connect(postgres.dsn())) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
        parts = parse_dsn(postgres.dsn(name))
        where = urlencode({setting: parts[setting] for setting in ("host", "port") if setting in parts})
        yield SecretStr(f"postgresql://{parts['user']}@/{name}?{where}")
        cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A classic session on two cores that keeps time and errors as the platform does; loopback, no UI.

    Plans are large and rows few: finding better plans on the way would take most of the time.
    """
    make_class_archive()
    os.environ |= workers_environment(Settings(_env_file=None))
    session = (
        SparkSession.builder.master("local[2]")
        .appName("omnisupport_ingest_tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.python.daemon.module", WORKER_DAEMON)
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.ansi.enabled", "true")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        .config("spark.sql.constraintPropagation.enabled", "false")
        .config("spark.python.sql.dataFrameDebugging.enabled", "false")
        .config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        .getOrCreate()
    )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Spark Connect server, for processes of which each would start a JVM of its own.

    It outlives those that are killed.
    """
    settings = Settings(
        home=tmp_path_factory.mktemp("warm") / "home", spark_driver_memory="1g", _env_file=None
    )
    home = Home.open(settings.home, settings.window_size)
    with Supervisor(home) as supervisor:
        yield start_spark_connect(supervisor, settings, home).url
