"""What can be wrong with a source, each by the command: the exact fix, nothing half done, and then it works.

Every test ends with the same command, which succeeds once the fix that it named has been carried out.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from omnisupport_ingest.landing.completeness import incomplete_now
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.protocol.walstream import WalStream
from omnisupport_ingest.sources.postgres.session.connection import connect_replication
from omnisupport_ingest.sources.postgres.session.errors import (
    BadDsn,
    PreflightFailed,
    SlotInUse,
    SourceRefused,
    SourceUnavailable,
)
from omnisupport_ingest_tests.cli.command import Done
from omnisupport_ingest_tests.sources.postgres.awkward import (
    PASSWORD,
    ROLE,
    SOURCE,
    TLS_ROLE,
    AwkwardServer,
    Shop,
    closed_port,
)
from omnisupport_ingest_tests.sources.postgres.fronts import tls_front
from omnisupport_ingest_tests.sources.postgres.shop_facts import same_as_source
from omnisupport_ingest_tests.sources.postgres.source_under_test import landed_events
from omnisupport_ingest_tests.waiting import until

CAPTURE = ("capture", "--once")


def refused(shop: Shop, code: int, *, dsn: str | None = None) -> Done:
    """The capture, which must fail with ``code``, twice alike, and leave nothing behind."""
    done = shop.run(*CAPTURE, dsn=dsn)
    assert done.code == code, done.output
    assert "Traceback" not in done.output and "\nFix: " in done.err
    assert shop.untouched()
    assert shop.run(*CAPTURE, dsn=dsn).code == code
    return done


def works(shop: Shop, *, dsn: str | None = None) -> None:
    """The same command, after the fix; preflight agrees."""
    checked = shop.run("preflight", dsn=dsn)
    assert checked.code == 0, checked.output
    done = shop.run(*CAPTURE, dsn=dsn)
    assert done.code == 0, done.output
    assert shop.landed()


@pytest.mark.parametrize(
    "dsn",
    [f"postgresql://me:{PASSWORD}@localhost:port/db", f"host=localhost passwrod={PASSWORD}", PASSWORD],
    ids=["port", "word", "text"],
)
def test_connection_string_that_cannot_be_read(shop: Shop, dsn: str) -> None:
    done = refused(shop, BadDsn.exit_code, dsn=dsn)
    assert "Write it as postgresql://user@host:5432/database" in done.err
    assert shop.run("preflight", dsn=dsn).code == BadDsn.exit_code
    works(shop)


def test_host_that_is_down(shop: Shop) -> None:
    dsn = shop.dsn(host="127.0.0.1", port=closed_port())
    done = refused(shop, SourceUnavailable.exit_code, dsn=dsn)
    assert "Start the server, or correct host and port in OMNISUPPORT_SOURCE_DSN" in done.err
    assert "Start the server" in shop.run("preflight", dsn=dsn).out
    works(shop)


def test_following_capture_waits_for_a_host_that_is_down_and_goes_on_when_it_is_up(
    awkward: AwkwardServer, shop: Shop
) -> None:
    awkward.server.stop()
    capture = shop.following()
    try:
        capture.says("Trying again in")
        awkward.server.start()
        until(shop.landed)
    finally:
        awkward.server.start()
        assert capture.stop() == 0


def test_wrong_password(shop: Shop) -> None:
    done = refused(shop, SourceRefused.exit_code, dsn=shop.dsn(password="wr0ng-word"))
    assert f'To set the password on the server, in psql: \\password "{ROLE}"' in done.err
    assert "wr0ng-word" not in done.output
    shop.sql(f"ALTER ROLE {ROLE} PASSWORD 'wr0ng-word'")
    try:
        works(shop, dsn=shop.dsn(password="wr0ng-word"))
    finally:
        shop.sql(f"ALTER ROLE {ROLE} PASSWORD '{PASSWORD}'")


def test_server_that_takes_only_tls(awkward: AwkwardServer, shop: Shop, tmp_path: Path) -> None:
    certificate, key = _self_made_certificate(tmp_path)
    with tls_front(certificate, key, plain=awkward.by_tcp, decrypted=awkward.by_socket) as port:
        given = {"host": "127.0.0.1", "port": port, "user": TLS_ROLE}
        done = refused(shop, SourceRefused.exit_code, dsn=shop.dsn(**given, sslmode="disable"))
        assert "Fix: Set sslmode=require in OMNISUPPORT_SOURCE_DSN" in done.err
        unknown = shop.dsn(**given, sslmode="verify-full", sslrootcert="/nowhere/root.crt")
        assert "Set sslrootcert" in refused(shop, SourceRefused.exit_code, dsn=unknown).err
        works(shop, dsn=shop.dsn(**given, sslmode="require"))
        works(shop, dsn=shop.dsn(**given, sslmode="verify-full", sslrootcert=certificate))


def _self_made_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the program openssl, which makes the certificate, is not installed")
    certificate, key = folder / "server.crt", folder / "server.key"
    subject = ("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    subprocess.run(
        [openssl, "req", "-x509", *curve, *subject, "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return certificate, key


def test_server_without_tls_and_a_client_that_wants_it(shop: Shop) -> None:
    done = refused(shop, SourceRefused.exit_code, dsn=shop.dsn(sslmode="require"))
    assert "ALTER SYSTEM SET ssl = on;" in done.err
    works(shop, dsn=shop.dsn(sslmode="prefer"))


def test_database_that_is_missing(awkward: AwkwardServer, shop: Shop) -> None:
    missing = f"{shop.database}_elsewhere"
    done = refused(shop, SourceRefused.exit_code, dsn=shop.dsn(dbname=missing))
    fix = f'CREATE DATABASE "{missing}";'
    assert fix in done.err
    # With the tables and the publication of the other one, as whoever makes it would restore them.
    awkward.sql(fix.replace(";", f" TEMPLATE {shop.database}"))
    try:
        works(shop, dsn=shop.dsn(dbname=missing))
    finally:
        awkward.sql(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            f" WHERE database = '{missing}' AND NOT temporary",
        )


def test_role_without_the_replication_right(shop: Shop) -> None:
    shop.sql(f"ALTER ROLE {ROLE} NOREPLICATION")
    fix = f'ALTER ROLE "{ROLE}" REPLICATION;'
    try:
        assert fix in refused(shop, PreflightFailed.exit_code).err
    finally:
        shop.sql(fix)
    works(shop)


def test_role_that_may_not_read_a_table(shop: Shop) -> None:
    shop.sql(f"REVOKE SELECT ON orders FROM {ROLE}", "REVOKE USAGE ON SCHEMA public FROM public")
    done = refused(shop, PreflightFailed.exit_code)
    for fix in (
        f'GRANT USAGE ON SCHEMA "public" TO "{ROLE}";',
        f'GRANT SELECT ON "public"."orders" TO "{ROLE}";',
    ):
        assert fix in done.err
        shop.sql(fix)
    works(shop)


def test_wal_level_that_is_not_logical(awkward: AwkwardServer, shop: Shop) -> None:
    shop.sql("ALTER SYSTEM SET wal_level = 'replica'")
    awkward.restart()
    fix = "ALTER SYSTEM SET wal_level = 'logical';"
    try:
        done = refused(shop, PreflightFailed.exit_code)
        assert "wal_level is replica" in done.err
        assert f"{fix}  -- then restart PostgreSQL" in done.err
    finally:
        shop.sql(fix)
        awkward.restart()
    works(shop)


def test_standby_in_place_of_the_primary(awkward: AwkwardServer, shop: Shop) -> None:
    awkward.restart(standby=True)
    try:
        checked = shop.run("preflight")
        assert checked.code == 1
        assert "The server is a standby" in checked.out
        assert "Set host and port in OMNISUPPORT_SOURCE_DSN to the primary" in checked.out
        assert "The server is a standby" in refused(shop, SourceRefused.exit_code).err
    finally:
        awkward.restart()
    works(shop)


def test_slot_that_somebody_else_has_is_told_with_who_reads_it(awkward: AwkwardServer, shop: Shop) -> None:
    shop.sql(f"SELECT pg_create_logical_replication_slot('{shop.database}', 'pgoutput')")
    stranger = connect_replication(shop.dsn(), application_name="another reader")
    stream = WalStream(stranger, shop.database, shop.database, Lsn(0))
    ((pid,),) = shop.query("SELECT active_pid FROM pg_replication_slots WHERE active")
    done = shop.run(*CAPTURE)
    assert done.code == SlotInUse.exit_code
    assert f"read by server process {pid}, application another reader, user {ROLE}" in done.err
    assert shop.home_is_empty()
    stream.close()
    fix = f"SELECT pg_drop_replication_slot('{shop.database}');"
    assert fix in done.err
    shop.sql(f"SELECT pg_terminate_backend({pid}, 5000)", fix)
    works(shop)


def test_publication_without_a_table(shop: Shop) -> None:
    shop.sql(f"ALTER PUBLICATION {shop.database} DROP TABLE orders")
    fix = f'ALTER PUBLICATION "{shop.database}" ADD TABLE "public"."orders";'
    store = LandingStore(shop.home / "landing", SOURCE)
    for number in (3, 4):
        shop.sql(f"INSERT INTO items VALUES ({number}, 'beside')", "UPDATE orders SET v = 'unseen'")
        done = shop.run(*CAPTURE)
        assert done.code == PreflightFailed.exit_code, done.output
        assert f"public.orders is not in publication {shop.database}" in done.err and fix in done.err
        assert "public.items" not in done.err, "one table alone is to blame"
        same_as_source(shop, "items")
        assert {event.source_table for event in landed_events(store)} == {"items"}
        assert incomplete_now(list(store.manifests()), "items", 1, ()) is None
        assert incomplete_now(list(store.manifests()), "orders", 1, ()) is not None
        told = shop.run("source", "status")
        assert told.code == 1 and fix in told.out, told.output
    shop.sql(fix)
    works(shop)
    same_as_source(shop)
    assert incomplete_now(list(store.manifests()), "orders", 1, ()) is None


def test_no_publication_and_a_role_that_cannot_make_it(shop: Shop) -> None:
    shop.sql(f"DROP PUBLICATION {shop.database}")
    done = refused(shop, PreflightFailed.exit_code)
    (fix,) = (line.strip() for line in done.err.splitlines() if "CREATE PUBLICATION" in line)
    assert "-- run by the owner of the tables" in fix
    shop.sql(fix.removeprefix("Fix: "))
    works(shop)


def test_contract_folder_that_is_empty(shop: Shop) -> None:
    for path in shop.contracts.iterdir():
        path.unlink()
    done = refused(shop, 2)
    assert f"{shop.contracts} holds no contract (*.json)." in done.err
    assert "contracts new --all" in done.err
    for table in ("items", "orders"):
        shop.contract(table)
    works(shop)


def test_no_contract_of_the_source(shop: Shop) -> None:
    for path in shop.contracts.iterdir():
        path.write_text(path.read_text().replace('"source": "shop"', '"source": "warehouse"'))
    done = refused(shop, 1)
    assert "contracts new --all --source shop" in done.err
    assert "Sources that have some: warehouse." in done.err
    for table in ("items", "orders"):
        shop.contract(table)
    works(shop)
