"""`python -m weir`, and the command `weir`, which is the same."""

import sys


def main() -> None:
    """Run the command line. This is the entry point of the distribution."""
    try:
        from weir.cli import main as run
    except KeyboardInterrupt:  # the imports take a while
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
