"""Measurements of single parts, taken where the parts run: time and peak memory side by side.

Nothing here trains, reads configs or data, or is imported by what it measures; whole training
runs are measured elsewhere, through their own entry point.
"""
