"""`python -m validate.figures`."""

from validate.figures.command import main

if __name__ == "__main__":
    main()
