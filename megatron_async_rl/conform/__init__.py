"""Tests of this package's methods against reference vectors (`mar conform`)."""
