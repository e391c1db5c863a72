"""Adapters: one package an engine. Translation only, no policy."""
