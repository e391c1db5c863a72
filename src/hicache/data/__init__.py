"""The data plane: bytes only. It knows pages and keys, never prefixes or tokens."""
