"""Where a page is, and why it is not there: asked of every member, which says what it has and remembers."""
