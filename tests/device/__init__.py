"""One contract of tensors on an accelerator, for every kind of device and of handle that moves them.

The fixture ``device`` (``conftest.py``) is each of the kinds of ``kinds.py`` in turn:

- ``simulated``: ``aio_handle`` and the device of ``doubles``, made of host memory. It runs nothing before
  somebody waits for it, so whatever the op fails to wait for shows as wrong bytes;
- ``fake-cufile``: ``gds_handle``, the same device and its libcufile, in a forked child for each test;
- ``gpu-aio``, ``gpu-gds`` and ``gpu-gds-off``: a real GPU, where work truly overlaps (``make gpu-test``).

The first two are no evidence about a GPU: its speed, its memory and its errors. What only one kind has is in a file of
that kind: ``test_simulated.py`` and ``test_gpu.py`` here, for cuFile's double in ``gds``.
"""
