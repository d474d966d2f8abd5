"""Process rewards beside outcomes."""
