"""A plan for each implementation: what a call enqueues, made once for a shape, and run each time."""
