"""Errors of landed batches; each message has the fix that a person can carry out."""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError


class LandingFailed(IngestError):
    """Data files could not be written (disk full, folder not writable, device error)."""


class ChainContested(IngestError):
    """Another writer has landed, or is writing, the same batch.

    The caller abandons its batch and stops. Nothing is lost: only landed batches are confirmed to the source,
    so what was read is sent again to whoever holds the chain.
    """


class EpochContested(IngestError):
    """Another process began the same epoch first."""


class ManifestUnreadable(IngestError):
    """A manifest or epoch record is missing, is not JSON, or a field of it is not what it must be."""


class ManifestFromNewerVersion(IngestError):
    """A manifest or epoch record has a format version that this program does not know."""


class DamagedBatch(IngestError):
    """A data file that a manifest names is missing, or is not the file that was landed."""
