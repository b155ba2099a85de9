"""`python -m fledge`: the command line."""

from fledge.cli import main

if __name__ == "__main__":
    main()
