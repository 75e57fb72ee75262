"""`python -m shardwright` is the command `shardwright`."""

from shardwright.cli import main

if __name__ == "__main__":
    main(prog_name="shardwright")
