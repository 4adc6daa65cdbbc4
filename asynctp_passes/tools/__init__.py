"""Programs for users: the command line, benchmarks, traces and the demo. Nothing else imports them."""
