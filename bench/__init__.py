"""Measurements that a person runs and reads: ``make bench``. Nothing in the tests depends on them."""
