"""The public functions: signature, documentation, checks, and then one call down."""
