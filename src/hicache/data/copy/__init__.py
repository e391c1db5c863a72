"""Copy engines: how bytes travel between placements. One file each; ``reference`` is the oracle of all others."""
