"""Measure what a setting costs and gains on this machine, and recommend one."""
