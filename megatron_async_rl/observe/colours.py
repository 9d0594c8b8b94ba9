"""The report's colours, the same on the sheet and on the page."""

INK, MUTED, GRID, AXIS = "#1f2933", "#6b7785", "#e6e9ed", "#b8c0c9"
BLUE, GREEN, AMBER, RED, PURPLE = "#2563a8", "#2e8b57", "#d98a00", "#c8372d", "#7a4fa3"

REGIMES = (GREEN, AMBER, RED)
"""By the code in `gac/regime`: kept, projected, skipped."""
TIMES = {"training": BLUE, "publishing": PURPLE, "waiting": AMBER, "other": "#c3cad2"}
