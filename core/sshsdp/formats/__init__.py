"""Runtime formats: how runtime parameters look and how they are written from masters."""
