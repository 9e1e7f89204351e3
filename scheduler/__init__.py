"""trilane: a bandwidth-adaptive scheduler for offloaded mixture-of-experts models."""

__version__ = "0.1.0"
