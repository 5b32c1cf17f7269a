"""Compiled implementations, called through a plain C interface; absent where no compiler was at hand."""
