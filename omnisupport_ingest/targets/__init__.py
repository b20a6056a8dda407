"""The current state of tables in another PostgreSQL: a warehouse that follows the lake."""
