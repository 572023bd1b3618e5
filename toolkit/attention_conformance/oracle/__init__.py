"""Attention and its gradients in 50 decimal digits, told position by position; knows nothing of the core."""
