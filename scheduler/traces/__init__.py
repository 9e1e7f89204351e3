"""Routing traces: what they are, the file that holds them, and what can be told of them at once."""
