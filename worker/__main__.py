"""`python -m worker` is `penstock`, for where the script is not on PATH."""

from worker.cli import main

if __name__ == "__main__":
    main()
