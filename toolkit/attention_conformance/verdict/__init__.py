"""Whether a kernel is right: `judge` asks, measures, and looks for the cause of what is wrong.

`expected` reads results that pass, and `script` writes a wrong call as a program without a line of the kit.
"""
