"""Attention and its gradients in 50 decimal digits, position by position, and in a wide type: `dense`.

It knows nothing of the core. `ulps` measures errors in units in the last place.
"""
