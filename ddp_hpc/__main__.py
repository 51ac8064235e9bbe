"""`python -m ddp_hpc`: the same as the console script `ddp-hpc`."""

import sys

from ddp_hpc.cli import main

if __name__ == "__main__":
    sys.exit(main())
