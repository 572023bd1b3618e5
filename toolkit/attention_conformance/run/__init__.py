"""Cases run on backends, in processes, and compared with the oracle or with published bits."""
