"""Platforms: where memory comes from. One file each."""
