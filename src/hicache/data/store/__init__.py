"""Stores: pages that outlive the process. ``base`` is the contract; one file or folder a store."""
