"""What distributed tests share: worker processes, models, training loops to compare, counters."""
