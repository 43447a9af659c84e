"""`weft`, or `python -m weft`. It imports the commands where Ctrl-C is caught already."""

import sys


def main() -> int:
    """Run one command and return its exit code (`weft.transforms.cli.main.main`)."""
    try:
        from weft.transforms.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
