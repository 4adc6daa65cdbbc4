"""Choose the transport of a call from facts that all ranks share, and then each rank's own implementation.

It calls no driver, and knows no tensor.
"""
