"""Parameters and gradients that are on storage, and in memory while they are used."""
