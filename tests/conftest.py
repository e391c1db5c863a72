"""What every test shares: how hypothesis runs."""

from hypothesis import settings

# No time limit for one example: the first one of a process pays for imports, and the machines are shared.
settings.register_profile("hicache", deadline=None, print_blob=True)
settings.load_profile("hicache")
