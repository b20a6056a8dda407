"""The differences that are known, by name. ``docs/debezium_parity.md`` explains each; any other fails."""

from __future__ import annotations

VERSION = "version"
PROCESSING_TIME = "processing_time"
TRANSACTION_BLOCK = "transaction_block"
SEQUENCE = "sequence"
TOMBSTONE = "tombstone"
TRANSACTION_MARKER = "transaction_marker"
MESSAGE_OUTSIDE = "message_outside_a_transaction"
KEY_CHANGE_HEADERS = "key_change_headers"
PRIMARY_KEY = "primary_key_for_identity"
MADE_UP_BEFORE = "made_up_before"
DEFAULT_FOR_NULL = "default_for_null"
NOT_A_NUMBER = "not_a_number"
TRAILING_ZEROS = "trailing_zeros"
INTERVAL = "interval_as_microseconds"
INTERVAL_CUT = "interval_cut_off"
NESTED_LIST = "nested_list"
FILLED_IN = "filled_in_from_old_row"
LIKE_THE_PLACEHOLDER = "like_the_placeholder"

CATEGORIES = (
    VERSION,
    PROCESSING_TIME,
    TRANSACTION_BLOCK,
    SEQUENCE,
    TOMBSTONE,
    TRANSACTION_MARKER,
    MESSAGE_OUTSIDE,
    KEY_CHANGE_HEADERS,
    PRIMARY_KEY,
    MADE_UP_BEFORE,
    DEFAULT_FOR_NULL,
    NOT_A_NUMBER,
    TRAILING_ZEROS,
    INTERVAL,
    INTERVAL_CUT,
    NESTED_LIST,
    FILLED_IN,
    LIKE_THE_PLACEHOLDER,
)
"""In the order in which they are reported."""
