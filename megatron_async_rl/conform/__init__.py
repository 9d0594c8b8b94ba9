"""`mar conform`: reference vectors against this project's own registries."""
