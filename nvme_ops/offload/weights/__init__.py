"""Weights, parameters and gradients that are kept in files, and in memory while something computes with them."""
