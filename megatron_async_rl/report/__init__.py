"""A run to look at: live display, HTML and PNG."""
