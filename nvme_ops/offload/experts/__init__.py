"""Experts of a mixture: those that are used often, or soon, are in memory."""
