"""Commands on a segment store's directory, beside whatever uses it: ``inspect``, ``verify`` and ``gc``."""
