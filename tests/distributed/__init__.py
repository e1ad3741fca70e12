"""Tests of the engine on real process groups."""
