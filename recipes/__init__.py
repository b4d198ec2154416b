"""Ready-made training runs: each folder is one, ``common`` is what they share."""
