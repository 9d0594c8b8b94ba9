"""Settings of a user: typed, frozen, unknown keys refused; YAML plus dotted overrides. Imports no
torch."""
