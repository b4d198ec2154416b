"""``python -m tokennorm``: the command line, for ``torchrun -m tokennorm ...``."""

import sys

from tokennorm.cli import main

if __name__ == "__main__":
    sys.exit(main())
