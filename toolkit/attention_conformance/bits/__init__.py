"""Two kernels to the last bit: `cases` that are the same by mathematics, and the `pair` that is compared."""
