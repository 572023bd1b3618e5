"""A run over the cases: a `job` becomes questions, and each is judged, in this process or in one of its own.

`alone` and `again` have wrong cases once more, by a program. `apart` compares what an untrusted process returns.
"""
