"""Training data: from text to the micro-batches of a step."""
