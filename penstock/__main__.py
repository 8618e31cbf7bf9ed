"""`python -m penstock` is `penstock`, for where the script is not on PATH."""

from penstock.worker.cli import main

if __name__ == "__main__":
    main()
