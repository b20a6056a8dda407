"""A password that changes: what is connected goes on, what connects anew is refused until it is right."""

from __future__ import annotations

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.session.errors import SourceRefused
from omnisupport_ingest.verify import services
from omnisupport_ingest_tests.cli.command import environment
from omnisupport_ingest_tests.sources.postgres.awkward import PASSWORD, ROLE, Shop
from omnisupport_ingest_tests.sources.postgres.shop_facts import landed_rows, status
from omnisupport_ingest_tests.waiting import PATIENCE, until

NEW = "an0ther-word"
CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'omnisupport-ingest'"


def test_capture_goes_on_when_its_password_is_changed_and_is_refused_when_it_connects_anew(
    shop: Shop,
) -> None:
    # A snapshot connects anew until it is over; a pass ends with it.
    assert shop.run("capture", "--once").code == 0
    running = shop.following()
    try:
        shop.sql("INSERT INTO items VALUES (3, 'three')")
        until(lambda: landed_rows(shop) == 1)
        shop.sql(f"ALTER ROLE {ROLE} PASSWORD '{NEW}'", "INSERT INTO items VALUES (4, 'four')")
        until(lambda: landed_rows(shop) == 2)
        shop.sql(CUT)
        assert running.process.wait(timeout=PATIENCE) == SourceRefused.exit_code
        assert status(shop, code=1)["last_error"]["error"] == "SourceRefused"
        told = running.process.communicate()[1]
        assert "password authentication failed" in told and "\\password" in told
        shop.sql("INSERT INTO items VALUES (5, 'five')")
        assert shop.run("capture", "--once", dsn=shop.dsn(password=NEW)).code == 0
        assert landed_rows(shop) == 3
    finally:
        running.process.kill()
        shop.sql(f"ALTER ROLE {ROLE} PASSWORD '{PASSWORD}'")


@pytest.mark.slow
def test_the_platform_tries_again_until_the_password_is_right(shop: Shop) -> None:
    told: list[str] = []
    with environment(**shop.settings()):
        settings = Settings(_env_file=None)
    home = Home.open(settings.home, settings.window_size)
    try:
        with Supervisor(home, report=told.append) as supervisor:
            supervisor.start(services.capture(settings))
            supervisor.wait(shop.landed, service="the snapshot", seconds=PATIENCE)
            shop.sql(f"ALTER ROLE {ROLE} PASSWORD '{NEW}'", CUT)
            refused = f"capture ended with exit code {SourceRefused.exit_code}"
            supervisor.wait(lambda: refused in "".join(told), service="the refusal", seconds=PATIENCE)
            shop.sql(f"ALTER ROLE {ROLE} PASSWORD '{PASSWORD}'", "INSERT INTO items VALUES (3, 'three')")
            supervisor.wait(lambda: landed_rows(shop) == 1, service="the row", seconds=PATIENCE)
    finally:
        shop.sql(f"ALTER ROLE {ROLE} PASSWORD '{PASSWORD}'")
