"""Memory that transfers use: ``pool`` bounds it, ``ring`` pipelines through it, ``arena`` divides it into tensors."""
