"""Contract suites for implementations outside this repository. They need pytest; nothing else does."""
