"""Errors of landed batches; each message has the fix that a person can carry out."""

from __future__ import annotations

from omnisupport_ingest.errors import IngestError


class LandingFailed(IngestError):
    """A batch cannot be written: the disk is full, the folder may not be written, or the device fails.

    Fix: Make room or give the right, and start again. Nothing was confirmed to the source, so nothing is
    lost.
    """


class ChainContested(IngestError):
    """Another process has landed the same batch, or is writing it.

    Fix: Let one capture read a source, and stop the other. Nothing is lost: what was read and did not land is
    sent again.
    """


class EpochContested(IngestError):
    """Another process has just begun the same epoch.

    Fix: Let one capture read a source; it uses the epoch that is there.
    """


class ManifestUnreadable(IngestError):
    """A manifest, or the record of an epoch, is missing, cannot be read, or is of another source.

    Fix: Restore the file that the message names from a backup of the landing folder.
    """


class ManifestFromNewerVersion(IngestError):
    """A manifest, or the record of an epoch, was written by a newer version of the program.

    Fix: Use that version.
    """


class DamagedBatch(IngestError):
    """A data file of a batch is missing, or is not the file that landed.

    Fix: Restore it from a backup of the landing folder; ``omnisupport-ingest landing verify`` finds every
    damaged one.
    """
