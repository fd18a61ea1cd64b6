"""The benchmark: every figure beside what the machine itself can do, measured in turns in the same run."""
