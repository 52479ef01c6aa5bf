"""States of an optimizer on storage."""
