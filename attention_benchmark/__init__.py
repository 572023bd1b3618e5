"""What attention costs: every implementation of the core, and the attentions of the frameworks.

A `Problem` says what is computed, a `Candidate` who computes it and how, and a `Measurement` what came of it.
"""

from attention_benchmark.candidate import CANDIDATES, Call, Candidate
from attention_benchmark.measurement import Measurement
from attention_benchmark.problem import Problem

__all__ = ["CANDIDATES", "Call", "Candidate", "Measurement", "Problem"]
