"""An optimizer whose states are on storage."""
