"""Measuring what a setting costs and brings on this machine, and recommending one."""
