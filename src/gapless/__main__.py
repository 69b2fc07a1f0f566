"""``python -m gapless``, and the command ``gapless``."""

import sys


def run() -> int:
    """``gapless.cli.main``; a Ctrl-C while it is imported ends as quietly as one later."""
    try:
        from gapless.cli import main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
