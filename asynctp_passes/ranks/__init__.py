"""What ranks do together while they compile: one question a graph (`accord`), and what becomes of errors (`undo`)."""
