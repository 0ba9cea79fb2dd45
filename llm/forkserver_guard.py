"""Imported first in the forkserver: what must hold there before torch is imported."""

import os

from llm.worker_entry import die_with_parent

# A fork copies only the thread that forks, so the libraries must not start any.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
# How often a thread that waits for others looks again before it sleeps: some 200 us, longer than what one thread does by
# itself between two parallel operations, shorter than a time slice, so that a crowded machine shows (llm/step_threads.py).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

die_with_parent()  # while it is importing, it doesn't see that its parent has died
