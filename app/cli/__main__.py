"""`python -m app.cli`: the same as `crosskv`."""

from app.cli.main import main

if __name__ == "__main__":
    main()
