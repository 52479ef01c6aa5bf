"""One mechanism for what is in memory when: entries are fetched, make room for others, and are written back."""
