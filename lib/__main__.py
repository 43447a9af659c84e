"""The commands `weft` and `python -m weft`."""

import sys


def main() -> int:
    """Run one command and return its exit code (`weft.transforms.cli.main.main`)."""
    # Imported inside the `try`, so that Ctrl-C during the slow import is caught too.
    try:
        from weft.transforms.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        # 128 + SIGINT, as a shell reports a command that Ctrl-C ended.
        return 130


if __name__ == "__main__":
    sys.exit(main())
