"""What a case asks of a kernel, and how far its results are from the truth.

`question` is a case for one kernel. `measures` and `properties` call it, once or in several calls that are the same by
mathematics. `bounds` measures the results against the oracle, by `profiles`, and `where` finds the wrong elements.
`finding` is what comes of it, and `messages` is what a process says of its work.
"""
