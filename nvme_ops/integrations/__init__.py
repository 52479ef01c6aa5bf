"""Hooks into other packages, each installed by one call and removed by another."""
