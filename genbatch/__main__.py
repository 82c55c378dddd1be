"""`python -m genbatch` is the command `genbatch`."""

from genbatch.clients.cli.main import main

if __name__ == "__main__":
    main()
