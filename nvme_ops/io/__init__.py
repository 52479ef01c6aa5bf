"""Moves tensors between files and memory: handles and their engines, futures, file objects, memory for transfers."""
