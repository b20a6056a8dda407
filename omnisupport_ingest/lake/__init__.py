"""Delta tables: Spark writes files, the table's log commits them, and the log is the truth."""
