"""Who is gathered, freed and reduced when, in one order on every rank.

It never looks into a space; it asks units. Read `orders` (the order), `schedule` (the states of
forward and backward), `hooks` (how modules call it).
"""
