"""Evaluation: the paper's datasets through lm-evaluation-harness."""
