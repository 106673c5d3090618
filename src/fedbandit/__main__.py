"""`python -m fedbandit`: the command line."""

from fedbandit.cli import main

if __name__ == "__main__":  # worker processes import this file too
    main()
