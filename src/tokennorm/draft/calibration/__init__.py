"""Calibration of the confidence head: metrics on accepted prefixes, and temperatures for the servers."""
