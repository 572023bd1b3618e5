"""Attention of a sequence of which each rank holds a shard: splits, collectives with a gradient, and strategies."""
