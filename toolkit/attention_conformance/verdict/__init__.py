"""Whether a kernel is right: `judge` asks, measures, and looks for the cause of what is wrong.

`expected` reads results that pass, and `memory` says which large cases do not fit.
"""
