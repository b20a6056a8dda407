"""Sources that are read by queries: tables read by a cursor column, without a log."""
