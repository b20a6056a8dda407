"""The proof: random histories by random schedules through the production layers, held against the oracle.

``python -m omnisupport_ingest_tests.proof --seeds 200 --start 0``; see ``docs/correctness.md``.
"""
