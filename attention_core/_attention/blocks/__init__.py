"""Attention block by block, in memory that does not grow with M × N."""
