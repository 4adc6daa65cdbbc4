"""Say what was done, and what was not: reports, pages, errors, and the vote of the ranks.

It edits nothing.
"""
