"""What the programs that measure share: how they end, and the scratch folder and file they work on.

``stop`` ends a command on signals, and its children with it; ``scratch`` is a folder that goes however a run ends;
``files`` makes the file in it, and drops it from the page cache, of which ``page_cache`` tells what is there;
``energy`` reads the machine's counters of joules.
"""
