"""Choose how a call is run: its wire, of what ranks share, and its implementation, which is a rank's own.

It calls no driver, and knows no tensor.
"""
