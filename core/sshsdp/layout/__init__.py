"""Pure layout arithmetic: address spaces, regions, pieces and the planner.

Nothing here needs a process group or touches tensor data; every function maps shapes to index
ranges.
"""
