"""Benchmark of time and memory: the implementations of the core against those of the frameworks.

A `Problem` is a computation, a `Candidate` a way to compute it, and a `Measurement` its result.
"""

from attention_benchmark.candidate import CANDIDATES, Call, Candidate
from attention_benchmark.measurement import Measurement
from attention_benchmark.problem import Problem

__all__ = ["CANDIDATES", "Call", "Candidate", "Measurement", "Problem"]
