"""First calls and imports in several threads at once, each round in a fresh process."""

import os
import subprocess
import sys

import pytest

from attention_core.backend import available_backends

ASKED = [name for name in os.environ.get("ATTENTION_CORE_BACKENDS", "").split(",") if name]
LIBRARIES = [name for name in ASKED or available_backends() if name in ("numpy", "array_api_strict", "torch", "jax")]
# The libraries are imported once, and each round is a process that forks from there. Threads that pause at every import
# of ours meet in the middle of one, however fast the machine is. While those of one round pause, others go on.
ROUNDS = """
import importlib, os, random, sys, threading, time, traceback, warnings
warnings.simplefilter("ignore")
*libraries, rounds = sys.argv[1:]
libraries = {name: importlib.import_module(name if name != "jax" else "jax.numpy") for name in libraries}

class Pause:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("attention_"):
            time.sleep(self.random.random() * 0.003)

def first_call(name):
    from attention_core import scaled_dot_product_attention as attention
    x = libraries[name].ones((1, 2, 3), dtype=libraries[name].float32)
    attention(x, x, x, implementation="dense")

def run_round(number):
    Pause.random = random.Random(number)
    sys.meta_path.insert(0, Pause())
    adapters = ["attention_core", *(f"attention_{name}" for name in libraries if name != "array_api_strict")]
    works = [(first_call, name) for name in libraries if name != "jax" or len(libraries) == 1]
    works += [(importlib.import_module, name) for name in adapters]
    Pause.random.shuffle(works)
    barrier, errors = threading.Barrier(len(works)), []

    def work(function, name):
        try:
            barrier.wait()
            function(name)
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=each, daemon=True) for each in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    errors += ["a thread still waits" for thread in threads if thread.is_alive()]
    print(*errors[:1], end="", flush=True)
    os._exit(bool(errors))

processes = []
for number in range(int(rounds)):
    processes.append(os.fork())
    if not processes[-1]:
        run_round(number)
print(sum(os.waitpid(process, 0)[1] != 0 for process in processes), "of", rounds)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a round starts from a process that has imported the libraries")
@pytest.mark.needs(lambda libraries: bool(libraries))  # those of the session
@pytest.mark.parametrize("libraries", [[name] for name in LIBRARIES] + [LIBRARIES] * (len(LIBRARIES) > 1), ids="-".join)
def test_first_calls_and_imports_may_meet_in_threads(libraries):
    command = [sys.executable, "-c", ROUNDS, *libraries, "10"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert found.stdout == "0 of 10\n", found.stdout + found.stderr
