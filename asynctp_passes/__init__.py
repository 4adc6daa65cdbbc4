"""asynctp: asynchronous tensor parallelism for torch.compile."""
