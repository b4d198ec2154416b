"""The command line: ``tokennorm COMMAND ...``.

The base install needs torch only, so every command imports what it needs when it runs. A mistake of the user is
told in the three parts of its error, without a traceback; anything unexpected keeps its traceback.
"""

from tokennorm.cli.main import main

__all__ = ["main"]
