"""The scripts of the named cases: run, compared with what they showed last, and told on a page."""
