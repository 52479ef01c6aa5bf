"""``nvme-bench``: measures what the storage can do, and how close each engine comes.

``measure`` and ``tables`` are the arithmetic, ``files`` the file to work on, ``engines`` a function for each
contender, ``cli`` the command.
"""
