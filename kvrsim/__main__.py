"""`python -m kvrsim`: the command line."""

from kvrsim.cli.main import run

if __name__ == "__main__":
    run()
