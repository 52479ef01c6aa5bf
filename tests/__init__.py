"""The tests. Each process computes with one thread: several with threads that spin take ten times as long."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
