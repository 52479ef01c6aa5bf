"""Memory that transfers use: ``pool`` bounds it, ``ring`` pipelines through it, ``tier`` divides it into tensors."""
