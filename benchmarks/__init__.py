"""Benchmarks: run them with ``make bench``, or one with ``python -m benchmarks.translate``."""
