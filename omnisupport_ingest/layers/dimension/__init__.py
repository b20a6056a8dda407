"""The dimension of a table: events are folded to net changes, and these update one row per key in place."""
