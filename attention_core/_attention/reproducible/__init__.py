"""Attention over blocks of exact sums: the same bits on every library."""
