"""Catalogue of metrics, the log that stores them, and the sinks that display them."""
