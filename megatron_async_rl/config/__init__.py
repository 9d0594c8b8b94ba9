"""What a user may say: typed, frozen, unknown keys refused; YAML plus dotted overrides. Imports no torch."""
