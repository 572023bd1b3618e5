"""Known mistakes: other conventions, faults that published kernels had, and questions that tell them apart.

`variants` and `diagnoses` compute what a mistaken kernel would return, and `causes` finds the one that a wrong result
equals. `former` has the arrays of earlier calls, and `experiments` asks the kernel again in a simpler way.
"""
