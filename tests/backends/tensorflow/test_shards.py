"""Replicas of TensorFlow that share a sequence."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "helpers" / "tensorflow_ranks.py"


def test_replicas_have_the_numbers_the_bits_and_the_gradients_of_one_device():
    """The program compares two logical processors with one, eagerly and in a graph, and what each is told."""
    subprocess.run([sys.executable, str(PROGRAM)], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
