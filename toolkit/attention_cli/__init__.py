"""The command ``attention-core``: ``backends``, ``bench``, ``conformance`` and ``convert``."""
