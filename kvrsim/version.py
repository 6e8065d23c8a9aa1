"""The version, apart from the facade, so that results can carry it."""

__version__ = "0.1.0"
