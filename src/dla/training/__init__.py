"""Training: from text to a checkpoint, on one CPU or many GPUs."""
