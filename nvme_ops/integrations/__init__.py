"""Thin hooks into other packages: each is put in place by a call, and taken away by another."""
