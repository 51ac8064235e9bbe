"""The command `ddp-hpc`, and `python -m ddp_hpc`."""

import sys


def main() -> int:
    """Run the command in `sys.argv`; return its exit code."""
    try:
        from ddp_hpc.cli import main as command  # late: Ctrl-C may come while it loads, and is to print no traceback

        return command()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted before the command began\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
