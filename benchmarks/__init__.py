"""Benchmarks: every figure that the documentation quotes, and the command that makes it again."""
