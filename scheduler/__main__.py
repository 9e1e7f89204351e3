"""``python -m trilane``: the command line, where its script is not on the path."""

from trilane.cli import main

if __name__ == "__main__":
    main()
