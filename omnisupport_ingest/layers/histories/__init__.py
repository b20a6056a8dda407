"""The history of a table: every version of every row, updated in place."""
