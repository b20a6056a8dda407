"""A database of a person's own, for commands that are given one."""

from __future__ import annotations

from omnisupport_ingest_tests.sources.postgres.conftest import source

__all__ = ["source"]
