"""Tests of the Lightning strategies, on real processes, against DDP."""
