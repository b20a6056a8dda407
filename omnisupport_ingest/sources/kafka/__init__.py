"""Kafka topics of Debezium events as a way in."""
