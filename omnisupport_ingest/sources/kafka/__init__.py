"""Ingestion of Debezium events from Kafka topics."""
