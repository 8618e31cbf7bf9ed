"""`python -m penstock` is `penstock`, for where the script is not on PATH."""

from penstock.cli import main

if __name__ == "__main__":
    main()
