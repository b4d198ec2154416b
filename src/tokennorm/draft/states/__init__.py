"""The target's hidden states: captured in one forward pass, or from a cache on disk."""
