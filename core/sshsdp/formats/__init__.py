"""Runtime formats: how the bytes of runtime parameters look and how they are written from masters."""
