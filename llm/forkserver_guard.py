"""Imported first in the forkserver: what must hold there before torch is imported."""

import os

from llm.worker_entry import die_with_parent

# A fork copies only the thread that forks, so the libraries must not start any.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
# Threads that wait by spinning are the faster ones on an idle machine. Where somebody else wants a core, each of a step's
# thousand barriers then waits for the scheduler's time slice: a step of 56 ms took 2.6 s (docs/decisions.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

die_with_parent()  # while it is importing, it doesn't see that its parent has died
