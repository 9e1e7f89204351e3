"""Adapters that put a scheduler under models of other libraries. Nothing else of ours imports them."""
