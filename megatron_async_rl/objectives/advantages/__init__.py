"""Advantage estimators: functions from the whole batch to advantages, in float64. All are pure."""
