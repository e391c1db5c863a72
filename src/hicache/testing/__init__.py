"""Contract suites, the explorer and fault injection; shipped, for authors of plug-ins."""
