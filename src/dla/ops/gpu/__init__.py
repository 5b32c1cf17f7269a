"""The stages in Triton: one file a stage. Nothing here is imported before a call needs it, and triton is optional."""
