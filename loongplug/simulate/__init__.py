"""The clock of a step: programs of ranks, and when each rank does what.

It lies below all that plans with it (:mod:`~loongplug.hetero`), and knows no model and no mode.
"""
