"""The report's colours, the same on the sheet and on the page."""

INK, MUTED, GRID, AXIS = "#1f2933", "#6b7785", "#e6e9ed", "#b8c0c9"
BLUE, GREEN, AMBER, RED, PURPLE = "#2563a8", "#2e8b57", "#d98a00", "#c8372d", "#7a4fa3"

REGIMES = (GREEN, AMBER, RED)
"""By the code in `gac/regime`: kept, projected, skipped."""
TIMES = {"training": BLUE, "publishing": PURPLE, "waiting": AMBER, "other": "#c3cad2"}
STATES = {
    "training": BLUE,
    "publishing": PURPLE,
    "evaluating": "#3aa6b9",
    "checkpointing": "#8c6d46",
    "waiting": "#f0c878",
    "busy": GREEN,
    "loading": PURPLE,
    "paused": AMBER,
    "asleep": "#9aa5b1",
    "idle": "#dde2e7",
}
"""Of a process's timeline. A state that is not here is drawn as `UNKNOWN`."""
UNKNOWN = "#000000"
ENGINES = (BLUE, GREEN, AMBER, PURPLE, RED, "#3aa6b9", "#8c6d46", MUTED)
"""By the engine's number; they repeat."""
