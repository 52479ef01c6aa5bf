"""``nvme-bench``: what the storage can do, and how close each way of using it comes.

``measure`` and ``tables`` are the arithmetic, ``files`` the file that is worked on, ``engines`` a function for each
contender, ``cli`` the command.
"""
