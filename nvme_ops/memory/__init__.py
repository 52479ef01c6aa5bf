"""Memory that transfers go through or end in: ``pool`` bounds it, ``ring`` pipelines in it, ``carve`` divides it."""
