"""The sign by which the engine's process knows that it is done."""

END = "parity.end"
"""Prefix of the logical message that nothing is compared behind."""
