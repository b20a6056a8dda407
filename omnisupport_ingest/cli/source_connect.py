"""``source connect``: opens a session for a person on the source database, embedded or configured."""

from __future__ import annotations

import os
import shutil

import click

from omnisupport_ingest.cli.opening import existing_home, log_of, open_settings, require_source_dsn
from omnisupport_ingest.cli.render import say_err
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.embedded.binaries import bundled
from omnisupport_ingest.sources.postgres.session.connect_errors import label_of

_SECRETS = ("password", "sslpassword")
_OURS = ("keepalives", "tcp_user_timeout")
"""Prefix of parameters that are for our own sessions, not for a person's."""

_SERVICE = "omnisupport_ingest"


class PassphraseNotHanded(IngestError):
    """``source connect`` cannot hand the passphrase of the client's key to psql.

    Fix: Put ``sslpassword`` into the file of your service, or use ``--print`` and a client of your own.
    """

    exit_code = 2

    def __init__(self, problem: str) -> None:
        super().__init__(
            problem + " psql takes it from a service file alone, a line without blanks around it.",
            fix="Put sslpassword into the file of your service (PGSERVICEFILE); or use --print and a client "
            "of your own.",
        )


@click.command()
@click.argument("name", required=False)
@click.option("--print", "only_print", is_flag=True, help="Only print how to connect.")
def connect(name: str | None, only_print: bool) -> None:
    """Connect to the source database with psql; without psql, print how to connect.

    NAME is a captured source (`sources list`); by default the one that the settings name.

    Leaving psql ends only its own session, and `up` may run beside it. The embedded PostgreSQL has no
    password: only its own user and root can reach its socket. A configured source's password is passed to
    psql in the environment, the passphrase of its key in a file in memory; neither is ever printed.

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
    dsn = require_source_dsn(settings, home)
    parameters = dsn_parts(dsn)
    shown = shown_dsn(dsn)
    psql = None if only_print else _psql()
    if psql is not None:
        # Never on the command line, which every user of the machine can read.
        secrets = {"PGPASSWORD": parameters["password"]} if "password" in parameters else {}
        if passphrase := parameters.get("sslpassword"):
            shown, service_file = _with_passphrase(shown, passphrase)
            secrets |= {"PGSERVICEFILE": service_file}
        os.execve(psql, [psql, shown], {**os.environ, **secrets})  # noqa: S606 - no shell is meant
    click.echo(shown)
    if not only_print:
        say_err("There is no psql here (Debian and Ubuntu: apt-get install postgresql-client).")
    say_err(_with_other_clients(shown, label_of(dsn).setting if "password" in parameters else None))


def _with_passphrase(dsn: str, passphrase: str) -> tuple[str, str]:
    """Return ``dsn`` with a service, and the path of the service file with the passphrase of the client's
    key.

    libpq has no variable for the passphrase. The file is in memory. The program that replaces this process
    inherits it; when the program ends, the file is gone.
    """
    from psycopg2.extensions import make_dsn

    from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

    if "service" in dsn_parts(dsn):
        raise PassphraseNotHanded("The connection string names a service, and has an sslpassword.")
    if passphrase != passphrase.strip() or "\n" in passphrase:
        raise PassphraseNotHanded("The sslpassword begins or ends with a blank, or has more than one line.")
    file = os.memfd_create("passphrase", 0)
    # No failpoint: a file in memory, which ends with its process.
    os.write(file, f"[{_SERVICE}]\nsslpassword={passphrase}\n".encode())
    return make_dsn(dsn, service=_SERVICE), f"/proc/self/fd/{file}"


def shown_dsn(dsn: str) -> str:
    """Return ``dsn`` for people: without any password, and without parameters of our own sessions."""
    from psycopg2.extensions import make_dsn

    from omnisupport_ingest.sources.postgres.session.connection import dsn_parts

    parts = dsn_parts(dsn)
    kept = {
        name: value for name, value in parts.items() if name not in _SECRETS and not name.startswith(_OURS)
    }
    text: str = make_dsn(**kept)
    return text


def _psql() -> str | None:
    """Return the psql of the machine, else that of the embedded server; None if there is none."""
    if (path := shutil.which("psql")) is not None:
        return path
    try:
        own = bundled() / "bin" / "psql"
    except IngestError:
        return None
    return str(own) if own.is_file() and os.access(own, os.X_OK) else None


def _with_other_clients(shown: str, password_in: str | None) -> str:
    also = (
        f"\nThe password is in {password_in}; any client takes it as the variable PGPASSWORD."
        if password_in is not None
        else ""
    )
    return (
        "Any client that takes a libpq connection string takes this one; from Python, for example:\n"
        f"  import psycopg2; connection = psycopg2.connect({shown!r}){also}"
    )
