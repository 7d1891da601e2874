"""`python -m bifolio` is the command `bifolio`."""

from bifolio.cli.main import main

if __name__ == "__main__":
    main()
