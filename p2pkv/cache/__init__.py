"""Pages: published, found, fetched."""
