"""Probes measure the machine: each is one ``measure_<what>()`` that returns a frozen result.

They time the product's own kernels with the product's own sizes, through the one routine in ``timing``. What
could not be measured is None and says why; it is never a guess.
"""
