"""Files and folders by name: the device that one is on, exclusive and durable creation, atomic replacement.

Nothing here knows tensors, nor how their bytes are moved; that is ``io``.
"""
