"""Files of parameters, and files of text that are written whole or not at all."""

import attention_core  # noqa: F401 (before its parts, for which two threads would wait for each other)
