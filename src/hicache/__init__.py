"""HiCache keeps a language model's key/value cache across device memory, host memory and storage."""

__version__ = "0.1.0"
