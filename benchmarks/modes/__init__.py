"""Measurements of modes side by side: levels, pipeline and context of ``benchmarks/bench.py``.

Each prints a table and can write JSON. They run training as it is.
"""
