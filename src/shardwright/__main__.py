"""`python -m shardwright` is the command `shardwright`."""

import sys


def main() -> None:
    """The command; Ctrl-C ends it in the same way while its modules are imported."""
    try:
        from shardwright.cli import main as command

        command(prog_name="shardwright")
    except KeyboardInterrupt:
        sys.stderr.write("shardwright: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
