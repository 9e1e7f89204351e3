"""Kernels for the processor: the format table, the dot products, the gates and the team of workers.

Nothing here knows of scheduling: of our own modules only the leaf ``trilane.jit`` is imported.
"""
