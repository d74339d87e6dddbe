"""The package's version, in a file that imports nothing."""

__version__ = "0.1.0"
