"""`python -m zeroshard`: the command line."""

from zeroshard.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
