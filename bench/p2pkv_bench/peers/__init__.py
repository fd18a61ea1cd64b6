"""Other systems that move pages between processes, with the same pages in the same run: ``make bench-peers``."""
