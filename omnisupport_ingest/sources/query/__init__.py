"""Sources that are asked by queries: tables read by a cursor column, where there is no log to read."""
