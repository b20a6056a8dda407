"""What tests of commands use: a home with a first batch in every layer, and a database of a person's own."""

from __future__ import annotations

from omnisupport_ingest_tests.cli.sample_home import sample_home, whole
from omnisupport_ingest_tests.sources.postgres.conftest import source

__all__ = ["sample_home", "source", "whole"]
