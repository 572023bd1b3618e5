"""How a problem becomes a call of a kernel: `fit` translates it, and `call` makes the call.

`watch` and `borrowed` look on: whether it writes where it must not, or calls an attention that is there already.
"""
