"""The version of this package, which its builds and its users are told."""

__version__ = "0.1.0"
