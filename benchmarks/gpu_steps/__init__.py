"""The steps of ``benchmarks/first_gpu.py``; outside of the wheel."""
