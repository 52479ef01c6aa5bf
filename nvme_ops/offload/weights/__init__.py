"""Weights, parameters and their gradients that live in files, and are in memory while something computes with them."""
