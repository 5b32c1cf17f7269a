"""The definition, step by step: what every other implementation is tested against."""
