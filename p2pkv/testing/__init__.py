"""Contract suites that implementations outside this repository can run. They need pytest; nothing else does."""
