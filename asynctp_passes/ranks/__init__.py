"""Ask the other ranks while a graph is compiled: one question a graph (`accord`), and undo what fails (`undo`)."""
