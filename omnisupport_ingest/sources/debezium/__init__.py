"""Files of Debezium events: the second way in. ``land.land`` takes one file in as one batch."""
