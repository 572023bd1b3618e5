"""Kernels of anybody: what each expects, by its `signature`, by small calls of `probe`, or as declared.

`target` loads one by its name, `presets` are those of libraries, and `adapters` stand before kernels of other layouts.
"""
