"""Say what was done, and what was not: reports, pages and errors.

It edits nothing, decides nothing, and asks no other rank.
"""
