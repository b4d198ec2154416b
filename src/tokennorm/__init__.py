"""tokennorm: every supervised token counts exactly once in every optimizer step."""

__version__ = "0.1.0"
