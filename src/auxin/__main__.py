"""`python -m auxin` is the `auxin` command."""

import sys

from auxin.cli import main

if __name__ == "__main__":
    sys.exit(main())
