"""Drafters on disk: the servers' schemas, export and import, and a validator."""
