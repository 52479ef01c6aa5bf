"""What measures: ``nvme-bench`` (``bench``), ``nvme-tune`` (``tune``), and the kit they share with ``benchmarks/``.

``rows`` measures in interleaved rounds and has the statistics, ``tables`` shows what was measured; ``engines`` has a
row for each way to move a file, ``remote`` rows in processes of their own. ``files`` and ``scratch`` are what a run
works on, ``stop`` is how it ends, ``machine`` and ``energy`` are what it ran on and used. Rows of other packages and
fio are in ``benchmarks/``.
"""
