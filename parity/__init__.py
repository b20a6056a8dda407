"""Our capture held against Debezium's own engine: ``python -m parity``. Not part of the package."""
