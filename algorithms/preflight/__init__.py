"""What a run needs and whether its packing is exact, before its first step."""
