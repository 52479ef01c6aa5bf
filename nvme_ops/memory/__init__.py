"""Memory that transfers use: ``pool`` bounds it, ``ring`` pipelines through it, ``carve`` divides it into tensors."""
