"""Views of a run: terminal display, report (HTML and PNG), dashboard and samples."""
