"""Tensors whose values are elsewhere: ``offloaded`` has them, ``operators`` what operators do with arguments."""
