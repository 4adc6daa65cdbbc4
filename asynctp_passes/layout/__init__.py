"""Where indices go through views: index maps, the ranks' blocks in them, and how they follow an FX graph's views.

It knows no chain and no cost.
"""
