"""Programs for users: the command line, benchmarks, traces and the demo. No other room imports them."""
