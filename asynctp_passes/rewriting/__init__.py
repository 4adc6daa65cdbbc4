"""The only place that edits graphs: it does what was planned, and refuses nothing."""
