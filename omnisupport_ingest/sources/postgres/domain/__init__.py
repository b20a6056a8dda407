"""What a demonstration database is: tables, first rows and traffic, as a value."""
