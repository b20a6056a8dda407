"""Ingestion of Debezium events from files. ``land.land`` lands one file as one batch."""
