"""``source connect``: a session of a person's own on the source database, embedded or configured."""

from __future__ import annotations

import os
import shutil

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.cli.source_opening import log_of, open_source_dsn
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.settings import PREFIX

_SECRETS = ("password", "sslpassword")
_OURS = ("keepalives", "tcp_user_timeout")
"""What begins so is of our own sessions, not of a person's."""


_SERVICE = "omnisupport_ingest"


class PassphraseNotHanded(IngestError):
    """The passphrase of the client's key cannot be handed to psql."""

    exit_code = 2

    def __init__(self, problem: str) -> None:
        super().__init__(
            problem + " psql takes it from a service file alone, a line without blanks around it.",
            fix="Put sslpassword into the file of your service (PGSERVICEFILE); or use --print and a client "
            "of your own.",
        )


@click.command()
@click.argument("name", required=False)
@click.option("--print", "only_print", is_flag=True, help="Print how to connect; start no client.")
def connect(name: str | None, only_print: bool) -> None:
    """Connect to the source database: with psql if there is one, else say how.

    NAME is a log of the home (`sources list`); without it, that of the settings.

    It is a client and no more: leaving it ends nothing but its own session, and `up` may run beside it.
    The embedded PostgreSQL has no password; only its own user and root can reach its socket. A password of a
    configured source is handed to psql by the environment, the passphrase of its key by a file in memory, and
    neither is ever printed.

    \b
    Examples:
      omnisupport-ingest source connect
      echo "SELECT count(*) FROM tickets" | omnisupport-ingest source connect
      omnisupport-ingest source connect --print

    Exit code: that of psql; 2 the passphrase cannot be handed on, 3 there is no home, 4 the embedded
    PostgreSQL does not run.
    """
    from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

    settings = log_of(open_settings(), name)
    home = None if settings.source_dsn is not None else existing_home(settings)
    dsn = open_source_dsn(settings, home)
    if isinstance(dsn, IngestError):
        raise dsn
    given = dsn_parts(dsn)
    shown = shown_dsn(dsn)
    psql = None if only_print else _psql()
    if psql is not None:
        # Not on the command line, which every user of the machine can read.
        secrets = {"PGPASSWORD": given["password"]} if "password" in given else {}
        if passphrase := given.get("sslpassword"):
            shown, service_file = _with_passphrase(shown, passphrase)
            secrets |= {"PGSERVICEFILE": service_file}
        os.execve(psql, [psql, shown], {**os.environ, **secrets})  # noqa: S606 - no shell is meant
    click.echo(shown)
    if not only_print:
        click.echo("There is no psql here (Debian and Ubuntu: apt-get install postgresql-client).", err=True)
    click.echo(_with_other_clients(shown, has_password="password" in given), err=True)


def _with_passphrase(dsn: str, passphrase: str) -> tuple[str, str]:
    """``dsn`` with a service, and the service file that has the passphrase of the client's key.

    No variable of libpq takes it. The file is in memory, is handed on to the program that takes the place of
    this one, and ends with it.
    """
    from psycopg2.extensions import make_dsn

    from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

    if "service" in dsn_parts(dsn):
        raise PassphraseNotHanded("The connection string names a service, and has an sslpassword.")
    if passphrase != passphrase.strip() or "\n" in passphrase:
        raise PassphraseNotHanded("The sslpassword begins or ends with a blank, or has more than one line.")
    file = os.memfd_create("passphrase", 0)
    os.write(file, f"[{_SERVICE}]\nsslpassword={passphrase}\n".encode())
    return make_dsn(dsn, service=_SERVICE), f"/proc/self/fd/{file}"


def shown_dsn(dsn: str) -> str:
    """``dsn`` for people: without any password, and without what only sessions of ours are given."""
    from psycopg2.extensions import make_dsn

    from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

    parts = dsn_parts(dsn)
    kept = {
        name: value for name, value in parts.items() if name not in _SECRETS and not name.startswith(_OURS)
    }
    text: str = make_dsn(**kept)
    return text


def _psql() -> str | None:
    """The psql of the machine, else the one that came with the embedded server, if it did."""
    from omnisupport_ingest.sources.postgres.embedded.binaries import bundled

    if (found := shutil.which("psql")) is not None:
        return found
    try:
        own = bundled() / "bin" / "psql"
    except IngestError:
        return None
    return str(own) if own.is_file() and os.access(own, os.X_OK) else None


def _with_other_clients(shown: str, *, has_password: bool) -> str:
    also = (
        f"\nThe password is in {PREFIX}SOURCE_DSN; any client takes it as the variable PGPASSWORD."
        if has_password
        else ""
    )
    return (
        "Any client that takes a libpq connection string takes this one; from Python, for example:\n"
        f"  import psycopg2; connection = psycopg2.connect({shown!r}){also}"
    )
