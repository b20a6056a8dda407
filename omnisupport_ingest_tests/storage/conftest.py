"""A source for the tests of this folder that read one."""

from omnisupport_ingest_tests.sources.postgres.conftest import source

__all__ = ["source"]
